"""Bytes that operations save, by hand."""

from dataclasses import replace

import pytest
from megatron_models import LayerPass, SavedBytes, layer_activations
from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.saved_bytes import LinearInput
from megatron_models.fused_operations import SEPARATE, fused_on_cuda
from megatron_parallel import RecomputeConfig

FEW = SavedBytes(2, linear_input=LinearInput(1.0, 1.5))
STREAM, INNER = 24 * 24, 24 * 40
"""Elements of the residual stream and of a feed-forward layer: 24 tokens, 24 and 40 channels."""


def test_a_linear_layer_saves_its_input_as_it_is_or_converted():
    plain = SavedBytes(2)
    assert (plain.of_linear(7), plain.of_linear(7, gathered=True)) == (14, 14)
    few = replace(plain, linear_input=LinearInput(1.25))
    assert (few.of_linear(8), few.of_linear(8, gathered=True)) == (10, 16)
    both = replace(plain, linear_input=LinearInput(1.25, 1.5))
    assert (both.of_linear(8), both.of_linear(8, gathered=True)) == (10, 12)


@pytest.mark.parametrize(
    ("length", "size"), [(1, 4), (32, 4 * 32), (33, 8 * 33), (512, 64 * 512), (513, 0)]
)
def test_a_mask_of_a_short_sequence_has_words_of_32_bits_in_each_row(length, size):
    assert SavedBytes(4, mask_bits=True).dropout_mask_of_head(length) == size
    assert SavedBytes(4).dropout_mask_of_head(length) == 0


@pytest.mark.parametrize(("activation", "copies"), [(2, 4), (4, 0), (8, 0)])
def test_unfused_attention_saves_scores_and_probabilities_in_float32_at_least(activation, copies):
    wide = max(activation, 4)
    found = SavedBytes(activation, mask_bits=True).with_unfused_attention()
    assert (found.per_score, found.attention_mask, found.mask_bits) == (2 * wide, 1, False)
    assert (found.logsumexp, found.qkv_copy) == (wide + 1, copies)
    bounded = SavedBytes(activation, dropped_scores=wide).with_unfused_attention(wide)
    assert bounded.per_score == 4 * wide
    assert bounded.with_unfused_attention(3).per_score == 4 * wide + 3


@pytest.mark.parametrize(
    ("backends", "fused_scores", "unfused"),
    [
        ({}, True, False),
        ({"attention": "triton"}, True, False),
        ({"attention": "flash_attn,triton"}, True, False),
        ({"attention": "flash_attn"}, False, False),
        ({"attention": "reference"}, False, True),
    ],
)
def test_backends_of_a_device_choose_what_attention_saves(backends, fused_scores, unfused):
    for dropout, dropped in ((False, 0), (True, 4)):
        found = SavedBytes.of_backends(2, backends, attention_dropout=dropout)
        assert found.fused_scores == fused_scores
        assert found.dropped_scores == dropped
        assert found.per_score == (8 + dropped if unfused else 0)
        assert (found.activation, found.norm_statistic) == (2, 4)


def test_fused_operations_save_their_inputs_and_statistics_alone():
    found = SavedBytes(2)
    nothing = ("dropout_mask", "per_score", "dropped_scores", "attention_mask", "window_mask")
    nothing += ("qkv_copy", "normalized_input", "norm_input", "logit")
    assert {getattr(found, name) for name in nothing} == {0}
    assert (found.logsumexp, found.norm_statistic, found.copies_for_gain) == (4, 4, True)
    assert not (found.mask_bits or found.pads_values or found.packs_rope or found.fused_scores)


def test_fused_operations_of_a_device_save_logits_and_pack_rotations():
    plain = SavedBytes.of_backends(2, {})
    assert plain.packs_rope and plain.logit == 2
    separate = {"rope_qkv": "separate", "vocab_cross_entropy": "separate"}
    assert not SavedBytes.of_backends(2, separate).packs_rope
    assert SavedBytes.of_backends(2, separate).logit == 0
    assert not SavedBytes.of_backends(2, {"rope_qkv": "reference"}).packs_rope


def test_a_cpu_saves_norms_in_float32_at_least():
    layer_norm, rms_norm = (SavedBytes.cpu(2, name) for name in ("LayerNorm", "RMSNorm"))
    assert (layer_norm.norm_input, layer_norm.normalized_input) == (0, 0)
    assert (rms_norm.norm_input, rms_norm.normalized_input) == (4, 4)
    assert (layer_norm.copies_for_gain, rms_norm.copies_for_gain) == (False, True)
    assert (layer_norm.logsumexp, layer_norm.window_mask, layer_norm.pads_values) == (4, 2, True)
    tiles = SavedBytes.cpu(8, "LayerNorm", attention_dropout=True)
    assert (tiles.logsumexp, tiles.window_mask, tiles.pads_values) == (0, 0, False)
    assert (tiles.dropped_scores, tiles.mask_bits, tiles.norm_statistic) == (8, True, 8)


def layer(config, saved_bytes=FEW, modules=(), **options):
    plan = RecomputeConfig("selective", modules=modules) if modules else RecomputeConfig()
    return layer_activations(config, LayerPass(8, 3, saved_bytes, recompute=plan, **options))


@pytest.mark.parametrize(
    ("options", "stream", "inner", "out"),
    [
        ({}, STREAM, INNER, 2 * STREAM),
        ({"sequence_parallel": True}, STREAM, INNER, 2 * STREAM),  # one rank gathers nothing
        ({"tp": 2}, STREAM, INNER // 2, STREAM),
        ({"tp": 2, "sequence_parallel": True}, STREAM // 2 * 3 // 2, INNER // 2, STREAM),
    ],
)
def test_inputs_of_linear_layers_are_converted(small, options, stream, inner, out):
    """One byte for an element, or one and a half if it is gathered; attention saves its output."""
    found = layer(small(), **options)
    parts = ("attention.qkv", "mlp.up", "mlp.down", "attention.out")
    assert [found[part] for part in parts] == [stream, stream, inner, out]


def test_inputs_are_not_converted_where_their_reader_or_their_norm_is_computed_again(small):
    norms = layer(small(), modules=("layernorm",))
    assert (norms["attention.qkv"], norms["mlp.up"], norms["mlp.down"]) == (0, 0, INNER)
    again = layer(small(), modules=("mlp",))
    assert (again["attention.qkv"], again["mlp.up"]) == (STREAM, 2 * STREAM)
    assert "mlp.down" not in again
    shared = small(parallel_residual="shared_norm")
    assert layer(shared)["mlp.up"] == STREAM  # each reader converts the same input
    assert layer(shared, SavedBytes(2))["mlp.up"] == 0


def test_projections_of_latents_convert_their_inputs(small):
    latent = {"multi_latent_attention": True, "position_embedding_type": "rope"}
    latent |= {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4}
    config = small(**latent, v_head_dim=8)
    parts = [f"attention.{name}" for name in ("q_down", "kv_down", "q_up", "kv_up")]
    found = layer(config)
    assert [found[part] for part in parts] == [STREAM, STREAM, 24 * 14, 24 * 10]
    halves = layer(config, tp=2, sequence_parallel=True)
    gathered = [12 * 14 * 3 // 2, 12 * 10 * 3 // 2]
    assert [halves[part] for part in parts] == [STREAM // 2, STREAM // 2, *gathered]
    direct = layer(replace(config, q_lora_rank=0), tp=2, sequence_parallel=True)
    assert direct["attention.q"] == STREAM // 2 * 3 // 2
    assert direct["attention.kv_down"] == STREAM // 2
    assert "attention.kv_down" not in layer(config, SavedBytes(2))
    assert "attention.kv_down" not in layer(config, modules=("layernorm",))


def test_a_linear_layer_in_place_of_another_gathers_nothing(small):
    replaced = '[{"attention": {"replace_with_linear": true}}]'
    config = small(num_layers=1, heterogeneous_layers_config_encoded_json=replaced)
    found = layer(config, tp=2, sequence_parallel=True)
    assert found["attention.linear"] == STREAM // 2
    assert found["mlp.up"] == STREAM // 2 * 3 // 2


def test_a_shared_expert_converts_its_input_in_low_precision_alone(small):
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 16}
    config = small(**experts, moe_shared_expert_intermediate_size=8)
    assert layer(config)["mlp.up"] == STREAM
    assert layer(config, replace(FEW, activation=4))["mlp.up"] == 4 * STREAM
    assert "mlp.up" not in layer(small(**experts))


def test_the_first_layer_is_counted_by_default(small):
    config = small(num_experts=4, moe_ffn_hidden_size=16, moe_layer_freq="[0,1]")
    layer_pass = LayerPass(8, 3, FEW)
    first, second = (layer_activations(config, layer_pass, layer=number) for number in (0, 1))
    assert layer_activations(config, layer_pass) == first != second


@pytest.mark.parametrize(
    ("name", "chosen", "fused"),
    [
        ("rope_qkv", {}, True),
        ("rope_qkv", {"rope_qkv": "auto"}, True),
        ("rope_qkv", {"rope_qkv": "reference"}, True),
        ("rope_qkv", {"rope_qkv": SEPARATE}, False),
        ("rope", {}, False),
    ],
)
def test_a_device_fuses_operations_unless_they_are_separate(name, chosen, fused):
    assert fused_on_cuda(name, chosen) == fused


LN_1P = {"apply_layernorm_1p": True}
RMS = {"normalization": "RMSNorm"}


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "row", "rest"),
    [
        ({}, SavedBytes(2), 8 * 2, 3 * 2 * 4),  # of each row the input, and mean and scale
        (RMS, SavedBytes(2), 8 * 2, 3 * 4),
        (LN_1P, SavedBytes(4), 8 * 4, 3 * 2 * 4 + 8 * 4),  # the gain 1 + weight
        (LN_1P, SavedBytes(8, norm_statistic=8), 8 * 8, 3 * 2 * 8 + 8 * 8),
        (LN_1P, SavedBytes(2, copies_for_gain=False), 8 * 2, 3 * 2 * 4),
    ],
)
def test_a_norm_saves_its_input_unless_another_does(changes, saved_bytes, row, rest):
    norm = NormSpec(num_layers=1, hidden_size=8, **changes)
    assert norm.saved(3, saved_bytes) == 3 * row + rest
    assert norm.saved(3, saved_bytes, shares_input=True) == rest


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "size"),
    [
        (LN_1P, SavedBytes(2), 3 * (8 * 4 + 2 * 4) + 2 * 8 * 4),  # gain and shift
        ({**LN_1P, "norm_bias": False}, SavedBytes(2), 3 * (8 * 4 + 2 * 4) + 8 * 4),
        ({**LN_1P, **RMS}, SavedBytes(2), 3 * (8 * 4 + 4) + 8 * 4),
        (LN_1P, SavedBytes(2, norm_statistic=0), 3 * 8 * 4 + 2 * 8 * 4),
        ({}, SavedBytes(2, norm_input=4, normalized_input=4), 3 * (8 * 4 + 8 * 4 + 2 * 4)),
    ],
)
def test_a_copy_of_the_input_in_float32_is_the_norm_s_own(changes, saved_bytes, size):
    norm = NormSpec(num_layers=1, hidden_size=8, **changes)
    assert norm.saved(3, saved_bytes) == norm.saved(3, saved_bytes, shares_input=True) == size
