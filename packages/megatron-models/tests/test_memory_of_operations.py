"""Bytes that operations save, by hand."""

from dataclasses import replace

import pytest
from megatron_models import SavedBytes
from megatron_models.components.saved_bytes import LinearInput


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
