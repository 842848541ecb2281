"""What settings of few bits mean: names, layers, bytes, histories, and hashes, by hand."""

import math
import struct
from dataclasses import replace

import pytest
import torch
from megatron_models import (
    ConfigError,
    EncoderDecoderConfig,
    GPTConfig,
    LowPrecisionConfig,
    check_low_precision,
    describe_low_precision,
)
from megatron_models.components.mixer import ParameterSpec
from megatron_models.low_precision.checks import low_precision_operations
from megatron_models.low_precision.delayed import history_sharding, largest_magnitude
from megatron_models.low_precision.memory import (
    HeldWeights,
    linear_roles,
    plain_layers,
    saved_inputs,
)
from megatron_models.low_precision.placement import roles_that_keep_inputs
from megatron_models.low_precision.recipe import recipe_of
from megatron_models.low_precision.spreading import hadamard, hashed_noise
from megatron_parallel import RecomputeConfig, Sharding

NONE = LowPrecisionConfig()
DELAYED = LowPrecisionConfig(fp8_format="hybrid")
TENSORWISE = LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise")
BLOCKWISE = LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise")
MXFP8 = LowPrecisionConfig(fp8_format="e4m3", fp8_recipe="mxfp8")
NVFP4 = LowPrecisionConfig(fp4_format="e2m1")
SIZES = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}
TENSOR = 32 / 4096**2
"""Bits of one float32 scale for each element of a large matrix."""
BITS = {
    "delayed": (DELAYED, 8 + TENSOR, 8 + TENSOR),
    "tensorwise": (TENSORWISE, 8 + TENSOR, 8 + TENSOR),
    "blockwise": (BLOCKWISE, 8 + 32 / 128, 8 + 32 / 128**2),
    "mxfp8": (MXFP8, 8 + 8 / 32, 8 + 8 / 32),
    "nvfp4": (NVFP4, 4 + 8 / 16 + TENSOR, 4 + 8 / 16**2 + TENSOR),
}
"""Bits of an element of an input and of a weight, with its share of scales."""


@pytest.mark.parametrize("name", BITS)
def test_a_saved_input_has_its_bits_and_a_share_of_the_scales(name):
    config, bits, _ = BITS[name]
    found = saved_inputs(config)
    assert found is not None and found.each == pytest.approx(bits / 8, rel=1e-12)
    whole = name in ("delayed", "tensorwise")  # blocks of tokens would be cut
    assert found.gathered == (found.each if whole else None)


def test_inputs_are_saved_as_they_are_without_few_bits_in_gradients_of_weights():
    assert saved_inputs(NONE) is None
    assert saved_inputs(replace(TENSORWISE, fp8_wgrad=False)) is None


@pytest.mark.parametrize("name", [name for name in BITS if name != "blockwise"])
def test_a_held_weight_has_both_matrices(name):
    config, _, bits = BITS[name]
    found = HeldWeights.of(config, {}, sharded=False)
    assert found.each == pytest.approx(2 * bits / 8, rel=1e-12)
    assert found.of_experts == pytest.approx(bits / 8, rel=1e-12)


def test_the_transpose_of_square_blocks_is_no_copy():
    bits = BITS["blockwise"][2]
    assert HeldWeights.of(BLOCKWISE, {}, sharded=False).each == pytest.approx(bits / 8, rel=1e-12)


def test_held_experts_have_a_transpose_for_kernels_that_read_one():
    bits = 8 + TENSOR
    chosen = {"quantized_grouped_matmul": "scaled_grouped_mm,reference"}
    assert HeldWeights.of(TENSORWISE, chosen, sharded=False) == HeldWeights(bits / 4, bits / 4)
    other = HeldWeights.of(TENSORWISE, {"quantized_grouped_matmul": "reference"}, sharded=False)
    assert other == HeldWeights(bits / 4, bits / 8)
    assert HeldWeights.of(TENSORWISE, chosen, sharded=True) == HeldWeights()
    assert HeldWeights.of(NONE, chosen, sharded=False) == HeldWeights() == HeldWeights(0.0, 0.0)


def test_matrices_of_the_roles_alone_are_held():
    held = HeldWeights(2.0, 3.0)
    matrix = ParameterSpec(Sharding((6, 4)), role="linear_fc1")
    experts = ParameterSpec(Sharding((2, 6, 4), experts=True), role="linear_fc1")
    vector = ParameterSpec(Sharding((6,)), role="linear_fc1")
    roles = {"linear_fc1"}
    assert [held.bytes_of(each, 10, roles) for each in (matrix, experts, vector)] == [20, 30, 0]
    assert held.bytes_of(matrix, 10, {"linear_fc2"}) == 0


def test_all_linear_layers_but_the_output_layer_multiply_in_few_bits():
    model = GPTConfig(**SIZES, untie_embeddings_and_output_weights=True)
    layers = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert linear_roles(model.parameters()) == layers


def test_the_outermost_layers_are_the_first_and_the_last_ones():
    ends = replace(DELAYED, first_last_layers_bf16=True)
    assert plain_layers(DELAYED, 7) == frozenset()
    assert plain_layers(ends, 7) == {0, 6}
    several = replace(ends, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=3)
    assert plain_layers(several, 7) == {0, 1, 4, 5, 6}
    assert plain_layers(replace(ends, num_layers_at_end_in_bf16=0), 7) == {0}
    assert plain_layers(replace(ends, num_layers_at_start_in_bf16=0), 7) == {6}


def test_one_layer_has_to_remain_between_the_outermost_ones():
    model = GPTConfig(**{**SIZES, "num_layers": 3})
    ends = replace(DELAYED, first_last_layers_bf16=True)
    check_low_precision(model, ends)
    check_low_precision(model, replace(ends, num_layers_at_end_in_bf16=0))
    with pytest.raises(ConfigError, match="leave none of 3 layers for fp8 delayed"):
        check_low_precision(model, replace(ends, num_layers_at_start_in_bf16=2))


def test_outermost_layers_are_not_defined_for_two_stacks():
    model = EncoderDecoderConfig(**SIZES, encoder_num_layers=9)
    check_low_precision(model, DELAYED)
    with pytest.raises(ConfigError, match="not defined for a model of several stacks of layers"):
        check_low_precision(model, replace(DELAYED, first_last_layers_bf16=True))


@pytest.mark.parametrize(
    ("config", "experts", "expected"),
    [
        (NONE, 0, ()),
        (NVFP4, 0, ()),
        (MXFP8, 0, ()),
        (BLOCKWISE, 0, ()),
        (DELAYED, 0, ("quantize_tensor",)),
        (TENSORWISE, 0, ("quantize_tensor",)),
        (
            TENSORWISE,
            4,
            ("quantize_tensor", "quantized_grouped_matmul", "quantized_grouped_gradient"),
        ),
    ],
)
def test_products_with_one_scale_choose_backends_of_casts(config, experts, expected):
    assert low_precision_operations(GPTConfig(**SIZES, num_experts=experts), config) == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (NONE, ""),
        (DELAYED, "fp8 delayed (hybrid)"),
        (MXFP8, "fp8 mxfp8 (e4m3)"),
        (NVFP4, "nvfp4 (e2m1)"),
        (replace(NVFP4, fp4_recipe="nvfp4-nearest"), "nvfp4-nearest (e2m1)"),
    ],
)
def test_a_recipe_has_a_name(config, name):
    assert config.name == name and config.enabled == bool(name)
    assert name in describe_low_precision(config, "cpu", torch.bfloat16)


def test_gradients_alone_have_more_exponent_bits_in_the_hybrid_format():
    hybrid, e4m3 = recipe_of(DELAYED), recipe_of(replace(DELAYED, fp8_format="e4m3"))
    assert [hybrid.of(each).elements for each in ("input", "weight", "gradient")] == [
        *("e4m3", "e4m3"),
        "e5m2",
    ]
    assert e4m3.gradient.elements == "e4m3"
    assert (hybrid.wgrad, hybrid.stochastic, hybrid.hadamard) == (True, False, False)
    fp4 = recipe_of(NVFP4)
    assert (fp4.wgrad, fp4.stochastic, fp4.hadamard) == (True, True, True)
    with pytest.raises(ConfigError, match="has no recipe; set fp8_format or fp4_format"):
        recipe_of(NONE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fp8_margin": 1}, "fp8_margin 1 has no effect without fp8_format"),
        ({"fp8_format": "e4m3", "num_layers_at_start_in_bf16": 0}, "0 has no effect without first"),
        (
            {"fp8_format": "e4m3", "fp8_amax_history_len": -1},
            "fp8_amax_history_len -1 must be at least 1",
        ),
        (
            {"fp8_format": "e4m3", "fp8_recipe": "tensorwise", "fp8_amax_history_len": 2},
            "fp8_amax_history_len 2 has no effect without the recipe delayed, but fp8_recipe",
        ),
        (
            {"fp8_format": "e4m3", "first_last_layers_bf16": True}
            | {"num_layers_at_end_in_bf16": -1},
            "num_layers_at_end_in_bf16 -1 must be at least 0",
        ),
    ],
)
def test_a_setting_without_effect_is_refused_with_its_value(settings, words):
    with pytest.raises(ConfigError) as caught:
        LowPrecisionConfig(**settings)
    assert words in str(caught.value)


def test_a_history_is_that_of_all_ranks_with_a_part_of_the_tensors():
    def combined(weight):
        found = history_sharding(weight, 5)
        assert found.shape == (3, 5) and found.reduce == "max" and found.dim is None
        return found.partial

    assert combined(Sharding((8, 4), "tp", 0)) == "tp"
    assert combined(Sharding((8, 4), partial="tp")) == "tp"
    assert combined(Sharding((8, 4))) is None
    assert combined(Sharding((2, 8, 4), "expert_tp", 1, experts=True)) == "tp"


def test_the_largest_magnitude_of_nothing_is_below_all_others():
    assert float(largest_magnitude(torch.tensor([[2.0, -3.0], [1.0, 0.5]]))) == 3
    assert float(largest_magnitude(torch.zeros(0, 4))) == -math.inf


def test_norms_that_are_computed_again_leave_the_inputs_of_their_readers():
    again = RecomputeConfig(granularity="selective", modules=("layernorm",))
    readers = {"linear_qkv", "linear_q", "linear_q_proj", "linear_q_down_proj", "linear_fc1"}
    readers |= {"linear_kv_down_proj", "in_proj", "linear"}
    assert roles_that_keep_inputs(again) == readers | {"linear_proj", "linear_kv"}
    other = RecomputeConfig(granularity="selective", modules=("core_attn",))
    assert roles_that_keep_inputs(other) == {"linear_proj", "linear_kv"}


def noise_of(number: float, index: int) -> float:
    """Mixes a float32 and its index as 32-bit integers, with Python's integers."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    mixed = (bits * 0x1E3779B1 % 2**32) ^ (index * 0x25EBCA6B % 2**32)
    mixed = (mixed ^ mixed >> 15) * 0x25EBCA6B % 2**32
    mixed = (mixed ^ mixed >> 13) * 0x32B2AE35 % 2**32
    return ((mixed ^ mixed >> 16) >> 8) / 2**24


def test_noise_is_the_hash_of_bits_and_index():
    """The numbers are part of every training curve in FP4."""
    x = torch.tensor([[1.5, -2.25, 0.0, 0.1], [3e38, -1e-30, 7.0, -0.3]])
    expected = [noise_of(number, index) for index, number in enumerate(x.flatten().tolist())]
    assert hashed_noise(x).flatten().tolist() == pytest.approx(expected, abs=1e-7)


def test_rows_are_padded_to_whole_transforms_and_keep_their_norm():
    for columns, padded in ((1, 16), (16, 16), (17, 32), (32, 32)):
        x = torch.arange(1.0, 2 * columns + 1, dtype=torch.float64).view(2, columns)
        found = hadamard(x)
        assert found.shape == (2, padded)
        squares = found.square().sum(1).tolist()
        assert squares == pytest.approx(x.square().sum(1).tolist(), rel=1e-12)
    first = hadamard(torch.eye(16, dtype=torch.float64))[:, 0] * 4  # the signs of the inputs
    signs = [1 - 2 * (0b0110_1011_0001_1101 >> number & 1) for number in range(16)]
    assert first.tolist() == signs
