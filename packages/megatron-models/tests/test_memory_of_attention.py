"""Bytes that attention saves, by hand.

A pass has 3 sequences of 8 tokens, and 4 heads of 6 channels unless other sizes are given.
"""

from dataclasses import replace

import pytest
from megatron_models import EncoderDecoderConfig, LayerPass, SavedBytes
from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.saved_bytes import LinearInput
from megatron_parallel import RecomputeConfig

from .test_attention_sizes import LATENT, ROPE

LENGTH, T = 8, 24
TWO, FOUR = SavedBytes(2), SavedBytes(4)
UNFUSED, WIDE = TWO.with_unfused_attention(), FOUR.with_unfused_attention()
ROWS = T * 4 * 4
"""The log-sum-exp of each query and head, in float32."""
SCORES = T * 4 * (5 + 8 * LENGTH) + LENGTH**2
"""Unfused: scores and probabilities in float32, each row's log-sum-exp and flag, and the mask."""
GATED = {"attention_output_gate": True}
HEADS = {"qk_layernorm": True}
WHOLE = {**HEADS, "qk_layernorm_scope": "projection", "normalization": "RMSNorm"}
SINKS = {"softmax_type": "off-by-one"}
LEARNED = {"softmax_type": "learnable"}
WARM = {"position_embedding_type": "none", "attn_temperature_scale": 0.4}


def groups(count):
    return {"num_query_groups": count}


def of_pass(spec, saved_bytes, *modules, **options):
    plan = RecomputeConfig("selective", modules=modules) if modules else RecomputeConfig()
    return spec.activations(LayerPass(LENGTH, 3, saved_bytes, recompute=plan, **options))


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "core", "heads"),
    [
        # The projection of 4 queries, 4 keys and 4 values, and rotated or normalized copies.
        ({}, TWO, ROWS, 12),
        (groups(2), TWO, ROWS, 8 + 4),  # queries of several groups are copied in order
        (groups(1), TWO, ROWS, 6),
        (ROPE, TWO, ROWS, 12 + 8),
        ({**ROPE, **groups(2)}, TWO, ROWS, 8 + 6),
        (ROPE, replace(TWO, packs_rope=True), ROWS, 12),
        ({**ROPE, **groups(2)}, replace(TWO, packs_rope=True), ROWS, 8),
        ({**ROPE, **GATED}, replace(TWO, packs_rope=True), ROWS + T * 24 * (2 + 4), 16 + 8),
        ({}, replace(TWO, packs_rope=True), ROWS, 12),
        (groups(2), replace(TWO, packs_rope=True), ROWS, 8 + 4),
        ({}, WIDE, SCORES, 12),
        (groups(2), WIDE, SCORES, 8 + 4),
        (groups(1), WIDE, SCORES, 6 + 4),
        # Masks: of a window as a summand, of dropout by bits.
        ({"sliding_window": 7}, replace(TWO, window_mask=2), ROWS + 64 * 2, 12),
        ({"sliding_window": 8}, replace(TWO, window_mask=2), ROWS, 12),
        ({"attention_chunk_size": 7}, replace(FOUR, window_mask=4), ROWS + 64 * 4, 12),
        ({"sliding_window": 7}, replace(WIDE, window_mask=4), SCORES, 12),
        ({}, replace(TWO, mask_bits=True), ROWS + 12 * (4 * 8), 12),
        # Gates: the output before them, and their sigmoid in at least float32.
        (GATED, TWO, ROWS + T * 24 * (2 + 4), 16),
        (GATED, SavedBytes(8), ROWS + T * 24 * (8 + 8), 16),
        # Sinks in another precision than the parameters.
        (SINKS, replace(TWO, fused_scores=True), ROWS + 4 * 4, 12),
        (SINKS, replace(SavedBytes(8), fused_scores=True), ROWS + 4 * 8, 12),
        (LEARNED, replace(TWO, fused_scores=True), ROWS + 4 * 4, 12),
        (LEARNED, replace(FOUR, fused_scores=True), ROWS, 12),
        (SINKS, FOUR, SCORES + 4 * 4, 12),
        (LEARNED, FOUR, SCORES, 12),
        # Scores that fused kernels do not have; a bound saves its tangents.
        ({"attn_logit_softcapping": 2.0}, FOUR, SCORES + T * 4 * 4 * LENGTH, 12),
        ({"attn_logit_softcapping": 2.0}, TWO, SCORES + T * 4 * 4 * LENGTH, 12 * 2),  # in float32
        ({"attn_logit_softcapping": 2.0}, SavedBytes(8), T * 4 * (9 + 3 * 8 * LENGTH) + 64, 12),
        ({"attn_logit_softcapping": 2.0}, replace(FOUR, fused_scores=True), ROWS, 12),
        ({"position_embedding_type": "alibi"}, FOUR, SCORES, 12),
        ({"position_embedding_type": "alibi"}, replace(FOUR, fused_scores=True), ROWS, 12),
        # One factor for each position, and the queries after it.
        (WARM, TWO, ROWS + LENGTH * 4, 12 + 4),
        (WARM, SavedBytes(8), ROWS + LENGTH * 8, 12 + 4),
        # Norms of heads: two statistics of a row, and an input that is no view of the projection.
        (HEADS, TWO, ROWS + T * (4 + 4) * 2 * 4, 12 + 8),
        ({**HEADS, **groups(2)}, TWO, ROWS + T * (4 * 6 * 2 + (4 + 2) * 2 * 4), 8 + 6),
        ({**HEADS, **groups(1)}, TWO, ROWS + T * (4 + 1) * 2 * 4, 6 + 5),
        # Norms of projections: one statistic for all heads.
        ({**WHOLE, **groups(2)}, TWO, ROWS + T * (24 * 2 + 4 + 4), 8 + 6),
        ({**WHOLE, **groups(1)}, SavedBytes(8), ROWS + T * (8 + 8), 6 + 5),
        # Norms without gains, after the rotation.
        ({**ROPE, "qk_l2_norm": True}, TWO, ROWS + T * 8 * (6 * 2 + 4), 12 + 8),
        ({**ROPE, "qk_l2_norm": True}, replace(TWO, norm_input=4), ROWS + T * 8 * (6 * 4 + 4), 20),
    ],
)
def test_attention_saves_scores_or_their_sums_and_the_projection(
    small, changes, saved_bytes, core, heads
):
    spec = small(**changes).component(AttentionSpec)
    size = saved_bytes.activation
    assert of_pass(spec, saved_bytes) == {"": core + T * heads * 6 * size, "out": T * 24 * size}


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "projection"),
    [
        ({}, UNFUSED, 0),
        (groups(2), UNFUSED, 0),
        (WHOLE, UNFUSED, T * 12 * 6 * 2),
        (HEADS, UNFUSED, T * 12 * 6 * 2),
        ({**HEADS, "apply_layernorm_1p": True}, UNFUSED, 0),
        (HEADS, replace(UNFUSED, norm_input=4), 0),
        (HEADS, replace(UNFUSED, norm_input=2), T * 12 * 6 * 2),
    ],
)
def test_float32_copies_of_heads_replace_the_projection_unless_norms_read_it(
    small, changes, saved_bytes, projection
):
    spec = small(**changes).component(AttentionSpec)
    norms = spec._saved_norms(T, 1, saved_bytes)
    copies = T * (4 + 2 * spec.num_query_groups) * 6 * 4
    assert of_pass(spec, saved_bytes)[""] == SCORES + norms + copies + projection


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "core", "heads"),
    [
        (GATED, TWO, 0, 16),
        ({"sliding_window": 5}, replace(TWO, window_mask=2, mask_bits=True), 0, 12),
        (SINKS, FOUR, 0, 12),
        (groups(1), WIDE, 0, 6),
        (groups(2), UNFUSED, 0, 8 + 4),
        (HEADS, TWO, T * (4 + 4) * 2 * 4, 12 + 8),
    ],
)
def test_recomputed_attention_saves_the_projection_alone(small, changes, saved_bytes, core, heads):
    spec, size = small(**changes).component(AttentionSpec), saved_bytes.activation
    found = of_pass(spec, saved_bytes, "core_attn")
    assert found == {"": core + T * heads * 6 * size, "out": T * 24 * size}


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "core", "heads"),
    [
        ({}, TWO, ROWS // 2, 6),
        (groups(1), TWO, ROWS // 2, 6),  # all of the group that two ranks share
        (GATED, TWO, ROWS // 2 + T * 12 * (2 + 4), 8),
        (SINKS, replace(TWO, fused_scores=True), ROWS // 2 + 2 * 4, 6),
        ({**HEADS, **groups(1)}, TWO, ROWS // 2 + T * (2 + 1) * 2 * 4, 6 + 3),
        ({**HEADS, **groups(2)}, TWO, ROWS // 2 + T * (2 + 1) * 2 * 4, 4 + 3),
        ({**ROPE, "qk_l2_norm": True, **groups(2)}, TWO, ROWS // 2 + T * 3 * (6 * 2 + 4), 4 + 3),
        ({**ROPE, **groups(2)}, replace(TWO, packs_rope=True), ROWS // 2, 2 + 2),
        ({**ROPE, **groups(1)}, replace(TWO, packs_rope=True), ROWS // 2, 6 + 3),
        ({}, replace(TWO, mask_bits=True), ROWS // 2 + 6 * (4 * 8), 6),
    ],
)
def test_a_rank_saves_its_own_heads(small, changes, saved_bytes, core, heads):
    spec = small(**changes).component(AttentionSpec)
    found = of_pass(spec, saved_bytes, tp=2)
    assert found == {"": core + T * heads * 6 * 2, "out": T * 12 * 2}


def test_biases_by_relative_position_are_added_to_unfused_scores():
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 61}
    config = EncoderDecoderConfig(
        **sizes, max_position_embeddings=16, position_embedding_type="relative"
    )
    spec = config.component(AttentionSpec)
    for saved_bytes in (FOUR, replace(FOUR, fused_scores=True)):
        assert of_pass(spec, saved_bytes)[""] == SCORES + T * 12 * 6 * 4


def test_only_norms_of_heads_copy_their_input_to_convert_it():
    head, whole = (
        QKNormSpec(num_layers=1, hidden_size=6, normalization="RMSNorm", whole=each)
        for each in (False, True)
    )
    centred = replace(head, apply_layernorm_1p=True)
    for size, copied in ((2, True), (4, False)):
        assert centred.copies_input(SavedBytes(size)) is copied
        assert not head.copies_input(SavedBytes(size, norm_input=size))
        assert head.copies_input(SavedBytes(size, norm_input=8))
        assert not whole.copies_input(SavedBytes(size, norm_input=8))


KEYS, VALUES = 4 * 10, 4 * 8
PADDED = replace(TWO, pads_values=True)
BOUND = {"attn_logit_softcapping": 2.0}


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "modules", "core"),
    [
        ({}, TWO, (), ROWS + T * (2 * KEYS + VALUES) * 2),
        ({}, TWO, ("core_attn",), T * (2 * KEYS + VALUES) * 2),
        ({}, TWO, ("mla_up_proj",), ROWS + T * 4 * 2),  # the shared key
        ({}, PADDED, (), ROWS + T * 4 * KEYS * 2),  # values and output as wide as keys
        ({}, PADDED, ("mla_up_proj",), ROWS + T * (2 * KEYS + 4) * 2),
        ({}, PADDED, ("core_attn",), T * (2 * KEYS + VALUES) * 2),
        ({"v_head_dim": 10}, PADDED, (), ROWS + T * 3 * KEYS * 2),
        ({}, UNFUSED, (), SCORES + T * (2 * KEYS + VALUES) * 4),
        ({}, UNFUSED, ("core_attn",), T * (2 * KEYS + VALUES) * 2),
        ({}, WIDE, (), SCORES + T * (2 * KEYS + VALUES) * 4),
        ({}, replace(WIDE, pads_values=True), (), SCORES + T * (2 * KEYS + VALUES) * 4),
        (BOUND, FOUR, (), SCORES + T * (4 * 4 * LENGTH + (2 * KEYS + VALUES) * 4)),
        (BOUND, TWO, (), SCORES + T * (4 * 4 * LENGTH + (2 * KEYS + VALUES) * 4)),
        ({}, replace(TWO, mask_bits=True), (), ROWS + 12 * 4 * 8 + T * (2 * KEYS + VALUES) * 2),
    ],
)
def test_latent_attention_saves_keys_and_values_or_latents(
    small, changes, saved_bytes, modules, core
):
    spec = small(**{**LATENT, **changes}).component(LatentAttentionSpec)
    found, size = of_pass(spec, saved_bytes, *modules), saved_bytes.activation
    assert found["out"] == T * 4 * spec.v_head_dim * size
    assert (found[""], found["kv_up"], found["q_up"]) == (core, T * 10 * size, 0)


@pytest.mark.parametrize(
    ("modules", "core", "out"),
    [((), T * 4 + T * 4 * 10 * 2, 0), (("core_attn",), T * (2 * 10 + 8) * 2, T * 10 * 2)],
)
def test_the_output_of_one_head_is_a_view_of_the_padded_one(small, modules, core, out):
    spec = small(**LATENT).component(LatentAttentionSpec)
    found = of_pass(spec, PADDED, *modules, tp=4)
    assert (found[""], found["out"]) == (core, out)
    assert of_pass(spec, TWO, *modules, tp=4)["out"] == T * 8 * 2


def test_norms_of_latents_save_their_inputs(small):
    changes = {"q_lora_rank": 14, "qk_layernorm": True, "normalization": "RMSNorm"}
    spec = small(**LATENT, **changes).component(LatentAttentionSpec)
    found = of_pass(spec, TWO, tp=2, sequence_parallel=True)
    rows = T // 2  # of this rank's part of the sequence
    assert found["q_norm"] == rows * (14 * 2 + 4) and found["kv_norm"] == rows * (10 * 2 + 4)
    assert found["q_up"] == rows * 14 * 2 and found["kv_up"] == rows * 10 * 2


def test_latents_are_converted_unless_keys_are_projected_again_from_them(small):
    spec = small(**LATENT, q_lora_rank=14).component(LatentAttentionSpec)
    few = replace(TWO, linear_input=LinearInput(1.0))
    for modules, size in (((), 1), (("core_attn",), 1), (("mla_up_proj",), 2)):
        found = of_pass(spec, few, *modules)
        assert (found["q_up"], found["kv_up"]) == (T * 14 * size, T * 10 * size)
