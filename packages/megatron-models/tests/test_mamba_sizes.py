"""Sizes of recurrent layers by hand: caches, ranks, initial values, and what they refuse."""

import math

import pytest
from megatron_models import (
    GPT,
    ConfigError,
    GPTConfig,
    LayerPass,
    MambaModelConfig,
    Placement,
    SavedBytes,
    StateSpec,
    StateTensor,
    layer_activations,
)
from megatron_parallel import Mesh

SIZES = {"num_layers": 1, "hidden_size": 16, "vocab_size": 61, "max_position_embeddings": 32}
MAMBA = MambaModelConfig(
    **SIZES,
    normalization="RMSNorm",
    mamba_num_groups=4,
    mamba_head_dim=4,
    mamba_state_dim=5,
    mamba_conv_kernel=3,
)
DELTA = GPTConfig(
    **SIZES,
    num_attention_heads=4,
    normalization="RMSNorm",
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="[1]",
    linear_conv_kernel_dim=3,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_caches_a_window_and_the_states_of_its_heads(tp):
    """Mamba: 8 heads in 4 groups. Delta nets: 4 value heads of 2 key heads."""
    convolved = 2 * 4 + 2 * 5  # values of a group's heads, B and C
    assert MAMBA.mixers[0].cached(tp) == StateSpec(
        (
            ("conv", StateTensor((2, 4 // tp * convolved))),
            ("scan", StateTensor((8 // tp, 4, 5), precise=True)),
        )
    )
    convolved = 2 * 6 + 2 * 5  # query, key and two values
    assert DELTA.mixers[0].cached(tp) == StateSpec(
        (
            ("conv", StateTensor((2, 2 // tp * convolved))),
            ("delta", StateTensor((4 // tp, 6, 5), precise=True)),
        )
    )


@pytest.mark.parametrize(("config", "name"), [(MAMBA, "mamba"), (DELTA, "attention")])
def test_two_ranks_save_half_of_a_recurrent_layer_each(config, name):
    one, two = (layer_activations(config, LayerPass(12, 3, SavedBytes(4), tp=tp)) for tp in (1, 2))
    inputs = 12 * 3 * 16 * 4
    assert one[f"{name}.in_proj"] == two[f"{name}.in_proj"] == inputs
    for part in (name, f"{name}.out_proj"):
        assert one[part] == 2 * two[part] > 0


def test_fused_projections_have_the_rows_of_their_parts():
    assert MAMBA.mixers[0].widths == (8, 8 + 2 * 5, 2)
    assert DELTA.mixers[0].widths == (6, 6, 10, 10, 2, 2)
    assert MAMBA.mixers[0].multiply_adds_of_state() == 3 * 32 * 5
    assert DELTA.mixers[0].multiply_adds_of_state() == 4 * 4 * 6 * 5
    assert MAMBA.mixers[0].dt_limits == (0.0, math.inf)
    assert (DELTA.linear_key_size, DELTA.linear_value_size) == (12, 20)


def test_initial_decays_of_delta_nets_have_the_range_of_megatron():
    config = GPTConfig(
        **SIZES,
        num_attention_heads=4,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq="[1]",
        linear_conv_kernel_dim=4,
        linear_key_head_dim=8,
        linear_value_head_dim=2,
        linear_num_key_heads=64,
        linear_num_value_heads=512,
    )
    layer = GPT(config, Placement(Mesh.single())).layers["0"].attention
    decays, filters = layer.A_log.detach().exp(), layer.conv_weight.detach()
    assert 1 <= decays.min() < 1.5 and 15 < decays.max() <= 16.001
    assert (layer.dt_bias == 1).all()
    assert 0.49 < filters.abs().max() <= 0.5 and abs(float(filters.mean())) < 0.02
    assert layer.sharding["conv_weight"].weight_decay
    assert not layer.sharding["A_log"].weight_decay and not layer.sharding["dt_bias"].weight_decay


@pytest.mark.parametrize(("config", "name"), [(MAMBA, "mamba"), (DELTA, "attention")])
def test_the_projections_of_a_recurrent_layer_are_its_only_matrices(config, name):
    table = {each: spec.sharding for each, spec in config.parameters().items()}
    matrices = {each for each, cut in table.items() if name in each and cut.matrix is not None}
    assert matrices == {f"layers.0.{name}.{part}.weight" for part in ("in_proj", "out_proj")}
    assert config.mixers[0].in_proj.fused_sizes == config.mixers[0].widths


@pytest.mark.parametrize(
    ("config", "setting"),
    [(MAMBA, "{mamba_num_groups}"), (DELTA, "{linear_num_key_heads:name}")],
)
def test_recurrent_layers_cannot_share_documents_over_ranks(config, setting):
    (mixer, *_) = config.mixers
    assert mixer.unsupported_reason("document_pool").setting == setting
    assert mixer.unsupported_reason("compile") is None
    assert mixer.recurrent and not mixer.heads


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_conv_kernel": 65}, "mamba_conv_kernel is 65, more than 64; use 64 or less"),
        ({"mamba_dt_min": 0.2, "mamba_dt_max": 0.1}, "mamba_dt_max 0.1 is not above mamba_dt_min"),
        ({"mamba_num_heads": 6}, "use mamba_num_groups 3 or 6, or mamba_num_heads 4 or 8"),
        ({"mamba_num_heads": 0, "mamba_head_dim": 5}, "does not divide 2 x hidden_size 16; use"),
    ],
)
def test_sizes_of_a_mamba_layer_that_do_not_fit_are_refused(changes, words):
    fields = {**SIZES, "mamba_num_groups": 4, "mamba_head_dim": 4, **changes}
    with pytest.raises(ConfigError) as caught:
        MambaModelConfig(**fields)
    assert words in str(caught.value)


def test_the_longest_convolution_and_a_limit_without_the_other_are_accepted():
    fields = {**SIZES, "mamba_num_groups": 4, "mamba_head_dim": 4, "mamba_conv_kernel": 64}
    assert MambaModelConfig(**fields, mamba_dt_min=0.5).mixers[0].dt_limits == (0.5, math.inf)
    found = MambaModelConfig(**fields, mamba_dt_max=0.5).mixers[0]
    assert found.dt_limits == (0.0, 0.5) and found.mamba_num_heads == 8
