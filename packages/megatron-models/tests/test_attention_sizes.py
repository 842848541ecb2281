"""Sizes, spans, slopes, factors and communication of attention, by hand."""

import math

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import ConfigError, EncoderDecoderConfig
from megatron_models.components.attention.alibi import alibi_slopes
from megatron_models.components.attention.context_parallel import (
    ContextParallel,
    check_context_parallel,
)
from megatron_models.components.attention.span import Span
from megatron_models.components.attention.spec import AttentionSpec, query_group_ranks
from megatron_models.components.attention.temperature import query_factors
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.mixer import KVSpec
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.context_parallel import ContextSplit

ROPE = {"position_embedding_type": "rope"}
LATENT = {
    **ROPE,
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_original_length": 8, "mscale_all_dim": 1.2}


@pytest.mark.parametrize(
    ("span", "narrow"),
    [
        (Span(), False),
        (Span(7), True),
        (Span(8), False),
        (Span(chunk=7), True),
        (Span(chunk=8), False),
        (Span(9, 7), True),
        (Span(7, 9), True),
    ],
)
def test_a_span_narrows_longer_sequences(span, narrow):
    assert span.narrows(8) == narrow


@pytest.mark.parametrize(
    ("span", "lengths", "pairs"),
    [
        (Span(), [8], 64),
        (Span(3), [8], 2 * (3 * 8) - 3 * 3),  # a band without a corner
        (Span(8), [8], 64),
        (Span(9), [8], 64),
        (Span(chunk=3), [8], 3 * 8),
        (Span(chunk=9), [8], 64),
        (Span(3, 4), [8], 4 * 8),
        (Span(3), [4, 4], 2 * (2 * 3 * 4 - 3 * 3)),  # two documents, each with its corner
        (Span(4), [4, 4], 2 * 16),
    ],
)
def test_a_span_counts_twice_the_pairs_of_causal_attention(span, lengths, pairs):
    assert span.pairs(sum(lengths), sum(length**2 for length in lengths)) == pairs


def test_heads_and_their_gates_are_clipped_by_their_rows(small):
    """Queries by the share alpha of the factor, keys by the rest, gates and values not at all."""
    config = small(num_query_groups=2)
    rows = ((12, 0.25), (6, 0.75), (6, 0.0))
    assert config.component(AttentionSpec).clipped_rows(0.25) == {
        "qkv.weight": rows,
        "qkv.bias": rows,
    }
    gated = small(num_query_groups=2, attention_output_gate=True, add_bias_linear=False)
    assert gated.component(AttentionSpec).clipped_rows(0.5) == {
        "qkv.weight": ((12, 0.5), (12, 0.0), (6, 0.5), (6, 0.0))
    }
    latent = small(**LATENT).component(LatentAttentionSpec)
    assert latent.clipped_rows(0.25) == {
        "q.weight": ((6, 0.25), (4, 1.0)),
        "kv_up.weight": ((6, 0.75), (8, 0.0)),
    }


PROJECTIONS = {"qkv.weight": (2, 24, 24), "out.weight": (24, 24)}
LATENTS = {"kv_down.weight": (14, 24), "kv_up.weight": (4, 14, 10), "out.weight": (24, 32)}
NORMS = {f"{name}_norm.weight": (size,) for name, size in (("q", 14), ("kv", 10))}
NO_BIAS = {"add_bias_linear": False}


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({}, {**PROJECTIONS, "qkv.bias": (2, 24), "out.bias": (24,)}),
        (NO_BIAS, PROJECTIONS),
        ({**NO_BIAS, "add_qkv_bias": True}, {**PROJECTIONS, "qkv.bias": (2, 24)}),
        ({**NO_BIAS, "add_attention_out_bias": True}, {**PROJECTIONS, "out.bias": (24,)}),
        ({**NO_BIAS, "softmax_type": "learnable"}, {**PROJECTIONS, "sinks.weight": (4,)}),
        ({**NO_BIAS, "softmax_type": "off-by-one"}, PROJECTIONS),
        ({**NO_BIAS, "attention_output_gate": True}, {**PROJECTIONS, "qkv.weight": (2, 36, 24)}),
    ],
)
def test_attention_has_a_fused_and_an_output_projection(small, changes, shapes):
    spec = small(num_query_groups=2, **changes).component(AttentionSpec)
    assert {name: each.sharding.shape for name, each in spec.parameters().items()} == shapes


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({}, {**LATENTS, "q.weight": (4, 10, 24), "out.bias": (24,)}),
        (NO_BIAS, {**LATENTS, "q.weight": (4, 10, 24)}),
        (
            {**NO_BIAS, "add_qkv_bias": True},
            {**LATENTS, "q.weight": (4, 10, 24), "kv_down.bias": (14,)},
        ),
        (
            {**NO_BIAS, "q_lora_rank": 14, "qk_layernorm": True, "normalization": "RMSNorm"},
            {**LATENTS, **NORMS, "q_down.weight": (14, 24), "q_up.weight": (4, 10, 14)},
        ),
    ],
)
def test_latent_attention_has_projections_down_and_up(small, changes, shapes):
    spec = small(**LATENT, **changes).component(LatentAttentionSpec)
    assert {name: each.sharding.shape for name, each in spec.parameters().items()} == shapes


@pytest.mark.parametrize("name", ["qk_layernorm", "qk_l2_norm"])
def test_normed_queries_and_keys_cannot_be_clipped(small, name):
    with pytest.raises(ConfigError, match=f"^{name} norms queries and keys after the projection"):
        small(**ROPE, **{name: True}).component(AttentionSpec).clipped_rows(0.5)


def test_the_activations_of_cross_attention_have_no_formula():
    sizes = {"num_layers": 1, "encoder_num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    config = EncoderDecoderConfig(**sizes, vocab_size=50, max_position_embeddings=16)
    (cross,) = [mixer for mixer in config.mixers if mixer.reads_source]
    with pytest.raises(ConfigError, match="no formula for the activations that cross-attention"):
        cross.activations(None)
    assert cross.bidirectional and cross.heads == 2
    assert cross.multiply_adds_of_pairs(8, 64) == 64 * 2 * 16


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "own", "sharing"),
    [(8, 8, 4, 2, 1), (8, 2, 1, 2, 1), (8, 2, 2, 1, 1), (8, 2, 4, 1, 2), (8, 2, 8, 1, 4)],
)
def test_ranks_divide_groups_or_share_them(small, heads, groups, tp, own, sharing):
    config = small(hidden_size=32, num_attention_heads=heads, num_query_groups=groups)
    assert config.groups_on_rank(tp) == own
    assert query_group_ranks(config, tp) == sharing
    assert config.component(AttentionSpec).cached(tp) == KVSpec(own, 4, 4)


def test_ranks_that_cannot_share_the_heads_of_a_group_are_refused(small):
    with pytest.raises(LayoutError, match="4 of 8 tensor-parallel ranks share a query group and"):
        query_group_ranks(small(num_query_groups=2), 8)
    config = small(hidden_size=48, num_attention_heads=12, num_query_groups=4)
    with pytest.raises(ConfigError, match=r"tp 3 and num_query_groups 4: .* use tp 2 or 4"):
        config.check_layout(ParallelLayout(tp=3, dp=1))


def test_latents_are_cached_once_for_all_heads(small):
    latent = small(**LATENT).component(LatentAttentionSpec)
    assert latent.cached(4) == KVSpec(1, 10 + 4, 10, values_in_keys=True)
    assert latent.multiply_adds_per_pair() == 4 * (6 + 4) + 4 * 8
    assert small().component(AttentionSpec).multiply_adds_per_pair() == 2 * 24


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1 / math.sqrt(10)),
        ({"softmax_scale": 0.7}, 0.7),
        ({**YARN, "rope_scaling_factor": 1.5}, (1 + 0.12 * math.log(1.5)) ** 2 / math.sqrt(10)),
        ({**YARN, "rope_scaling_factor": 40.0}, (1 + 0.12 * math.log(40)) ** 2 / math.sqrt(10)),
        ({**YARN, "rope_scaling_factor": 0.5}, 1 / math.sqrt(10)),
        ({**YARN, "mscale_all_dim": 0.0}, 1 / math.sqrt(10)),
        ({"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}, 1 / math.sqrt(10)),
    ],
)
def test_yarn_scales_the_scores_of_latents_by_the_square_of_its_magnitude(small, changes, scale):
    found = small(**LATENT, **changes).latent_softmax_scale
    assert found == pytest.approx(scale, rel=1e-12)


def test_slopes_of_heads_are_those_of_the_paper_s_code():
    """Of 6 heads, 4 have the slopes of 4 heads, and 2 every other slope of 8 heads."""
    of_six = [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0]
    options = {"device": torch.device("cpu"), "dtype": torch.float64}
    assert alibi_slopes(6, 0, 6, **options).tolist() == of_six
    assert alibi_slopes(6, 3, 2, **options).tolist() == of_six[3:5]
    assert alibi_slopes(8, 0, 8, **options).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1, 0, 1, **options).tolist() == [2.0**-8]
    narrow = alibi_slopes(6, 0, 6, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert narrow.dtype == torch.float32 and narrow.tolist() == of_six


def test_factors_of_queries_change_after_every_so_many_positions():
    positions = torch.tensor([0, 1, 2, 4, 5])[:, None]
    found = query_factors(positions, 0.5, 3, torch.float64)
    assert found.shape == (5, 1, 1, 1)
    steps = (0, 0, 1, 1, 2)
    expected = [0.5 * math.log(1 + step) + 1 for step in steps]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12)
    assert query_factors(positions, 0.5, 3, torch.bfloat16).dtype == torch.float32


def test_each_layer_has_its_communication(small):
    mixers, layout = small(num_layers=3).mixers, ParallelLayout(cp=2, dp=1)
    assert check_context_parallel(mixers, 3, layout, "p2p") == ("p2p",) * 3
    chosen = ("a2a", "p2p", "allgather")
    assert check_context_parallel(mixers, 3, layout, chosen) == chosen
    mesh, split = Mesh(layout, 0), ContextSplit.zigzag(8, 2)
    for names in (chosen, ("a2a",) * 3):
        parallel = ContextParallel(mesh, mesh.axis("cp"), names, split, Mask(), None)
        assert [parallel.comm_of(layer) for layer in range(3)] == [*names]


def test_a_pool_exchanges_heads_over_all_of_its_ranks(small):
    mixers = small(hidden_size=36, num_attention_heads=3).mixers
    assert check_context_parallel(mixers, 2, ParallelLayout(dp=2), "a2a") == ("a2a",) * 2
    with pytest.raises(LayoutError, match=r"3 heads on each tensor-parallel rank .* over 2"):
        check_context_parallel(mixers, 2, ParallelLayout(dp=2, hybrid_cp=True), "a2a")


@pytest.mark.parametrize(
    ("heads", "layout", "comm", "message"),
    [
        (3, {"cp": 2}, "a2a", "3 heads on each tensor-parallel rank .* over 2"),
        (4, {"cp": 2}, "a2a+p2p", "needs the layout's hierarchical_cp, two sizes"),
        (4, {"cp": 1}, "a2a+p2p", None),
        (3, {"cp": 1}, "a2a", None),
        (2, {"cp": 8, "hierarchical_cp": (4, 2)}, "a2a+p2p", "2 heads on each .* over 4"),
        (2, {"cp": 8, "hierarchical_cp": (2, 4)}, "a2a+p2p", None),
        (4, {"cp": 2, "tp": 4}, "a2a", "1 heads on each tensor-parallel rank .* over 2"),
        (4, {"cp": 4, "tp": 1}, "a2a", None),
        (3, {"cp": 2}, "p2p", None),
    ],
)
def test_ranks_that_exchange_heads_have_to_divide_them(small, heads, layout, comm, message):
    mixers = small(hidden_size=12 * heads, num_attention_heads=heads).mixers
    degrees = ParallelLayout(dp=1, **layout)
    if message is None:
        assert check_context_parallel(mixers, 2, degrees, comm) == (comm, comm)
        return
    with pytest.raises((ConfigError, LayoutError), match=message):
        check_context_parallel(mixers, 2, degrees, comm)
