"""The cache in blocks: what decoding reads in place, and masks that need a copy."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from megatron_infer import SamplingParams, SlotCache, generate_tokens
from megatron_infer.engine.cache import BLOCK_SIZE
from megatron_infer.engine.paged import PagedKV
from megatron_kernels import Mask, Pages, Scores, attention
from megatron_models import GPT, DenseKV, GPTConfig, KVHandle, Placement, batch_invariant
from megatron_parallel import Mesh

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2], list(range(40)), [7] * 19, [3]]


def make_model(
    dtype: torch.dtype = torch.float64, invariant: bool = False, **changes: object
) -> GPT:
    sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101}
    config = GPTConfig(
        **sizes,
        num_query_groups=2,
        max_position_embeddings=80,
        position_embedding_type="rope",
        **changes,
    )
    placement = Placement(Mesh.single(), dtype=dtype)
    return GPT(config, batch_invariant(config, placement) if invariant else placement)


def filled() -> tuple[SlotCache, torch.Tensor, torch.Tensor]:
    """Returns a cache of three slots with 21, 30 and 4 tokens, and what is in the first layer."""
    cache = SlotCache(3, 40, device=CPU)
    k, v = (torch.randn(31, 3, 2, 8, dtype=torch.float64) for _ in range(2))
    for slot, length in enumerate((21, 30, 4)):
        cache.begin_pass([slot], [0])
        handle = cache.update(0, k[:length, [slot]], v[:length, [slot]])
        assert isinstance(handle, DenseKV) and isinstance(handle, KVHandle)
    assert cache.layers == (0,)
    return cache, k, v


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0], [1]])
def test_new_tokens_attend_to_all_tokens_of_their_slots(slots: list[int]) -> None:
    cache, k, v = filled()
    starts = [(21, 30, 4)[slot] for slot in slots]
    cache.begin_pass(slots, starts)
    new = [
        torch.stack([x[s, slot] for s, slot in zip(starts, slots, strict=True)])[None]
        for x in (k, v)
    ]
    handle = cache.update(0, *new)
    assert isinstance(handle, PagedKV) and isinstance(handle, KVHandle)
    q = torch.randn(1, len(slots), 4, 8, dtype=torch.float64)
    for window in (None, 3):
        found = handle.attend(q, Mask(window=window), query_offset=max(starts))
        for row, (start, slot) in enumerate(zip(starts, slots, strict=True)):
            keys, values = (x[: start + 1, [slot]] for x in (k, v))
            alone = attention(q[:, [row]], keys, values, Mask(window=window), query_offset=start)
            torch.testing.assert_close(found[:, [row]], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "blocks"), [(16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_slot_has_the_blocks_of_its_tokens(length: int, blocks: int) -> None:
    assert BLOCK_SIZE == 16
    cache = SlotCache(3, length, device=CPU)
    cache.begin_pass([0, 2], [0, length - 1])
    new = torch.ones(1, 2, 2, 8)
    handle = cache.update(0, new, new)
    assert isinstance(handle, PagedKV)
    assert handle.k.shape == handle.v.shape == (3 * blocks, 16, 2, 8)
    # Slots are the blocks from 0, from `blocks` and from `2 * blocks` on.
    assert handle.pages.tables.tolist() == [[*range(blocks)], [*range(2 * blocks, 3 * blocks)]]
    assert handle.pages.lengths.tolist() == [1, length]
    assert handle.pages.runs == ((0, 1), (2 * blocks, length))


def test_tables_end_with_the_longest_sequence_of_a_pass() -> None:
    cache = SlotCache(2, 64, device=CPU)
    new = torch.ones(2, 2, 2, 8)
    for starts, columns in (([1, 14], 1), ([15, 1], 2), ([30, 1], 2), ([31, 30], 3)):
        cache.begin_pass([0, 1], starts)
        handle = cache.update(0, new, new)
        assert isinstance(handle, PagedKV)
        assert handle.pages.tables.tolist() == [[*range(columns)], [*range(4, 4 + columns)]]


def test_queries_without_an_offset_begin_a_sequence() -> None:
    pools = [torch.randn(2, BLOCK_SIZE, 2, 8, dtype=torch.float64) for _ in range(2)]
    table = torch.ones(1, 1, dtype=torch.int32)
    handle = PagedKV(*pools, Pages(table, torch.tensor([5], dtype=torch.int32)))
    assert handle == handle and handle != replace(handle)  # tensors are not compared
    q = torch.randn(5, 1, 4, 8, dtype=torch.float64)
    keys, values = (pool[1, :5, None] for pool in pools)
    for mask in (Mask(), Mask(causal=False)):
        found = handle.attend(q, mask)
        torch.testing.assert_close(found, attention(q, keys, values, mask), rtol=1e-12, atol=1e-12)


def test_masks_and_scores_of_other_kinds_equal_attention_over_a_copy() -> None:
    cache, k, v = filled()
    cache.begin_pass([1], [28])
    handle = cache.update(0, k[28:30, [1]], v[28:30, [1]])
    q = torch.randn(2, 1, 4, 8, dtype=torch.float64)
    keys, values = k[:30, [1]], v[:30, [1]]
    bias = torch.randn(1, 4, 2, 30, dtype=torch.float64)
    dense = Mask(dense=torch.rand(1, 2, 30) < 0.5)
    for mask, scores, backend in (
        (dense, Scores(), "auto"),
        (replace(dense, window=7), Scores(), "auto"),  # the tensor counts, not the window
        (Mask(causal=False), Scores(), "auto"),
        (Mask(chunk=16), Scores(), "torch"),
        (Mask(prefix=29), Scores(), "auto"),
        (Mask(), Scores(bias=bias), "auto"),
        (Mask(), Scores(), "tiles,torch"),
    ):
        found = handle.attend(q, mask, query_offset=28, scores=scores, backend=backend)
        expected = attention(q, keys, values, mask, scores, 28)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("new", [[3, 20, 9, 15], [12, 12, 12, 12]])
def test_decoding_on_a_cpu_copies_no_keys(new: list[int]) -> None:
    model = make_model()
    settings = [SamplingParams(max_new_tokens=count, temperature=0.0) for count in new]
    expected = generate_tokens(model, PROMPTS, settings)
    with mock.patch.object(Pages, "gather", side_effect=AssertionError("gathered")):
        assert generate_tokens(model, PROMPTS, settings) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_invariant_model_gives_a_prompt_the_same_bits_in_every_batch(
    dtype: torch.dtype,
) -> None:
    model = make_model(dtype, invariant=True)
    settings = SamplingParams(max_new_tokens=BLOCK_SIZE + 3, temperature=0.0)
    together = generate_tokens(model, PROMPTS, settings, log_probs=True)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert generate_tokens(model, [prompt], settings, log_probs=True) == [expected]
