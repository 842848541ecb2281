"""Splits of sequences, masks and work over context-parallel ranks."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_parallel import DropoutKey, LayoutError, ParallelLayout
from megatron_parallel.context_parallel import (
    ContextSplit,
    SequenceMask,
    attention_pairs,
    imbalance,
    plan_ring,
)
from megatron_parallel.dropout import keep_mask
from megatron_parallel.mesh import draw_layout


def documents(lengths: list[int], total: int) -> torch.Tensor:
    """Returns document ids of a sample `[1, total]`; the rest is padding."""
    ids = torch.full((1, total), -1)
    start = 0
    for number, length in enumerate(lengths):
        ids[0, start : start + length] = number
        start += length
    return ids


def test_zigzag_gives_each_rank_a_slice_from_both_ends() -> None:
    """As in Megatron: rank r holds slices r and 2 n - 1 - r of 2 n."""
    places = ContextSplit.zigzag(16, 4).indices
    assert places[:, 0].tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_a_length_that_does_not_divide_is_refused_with_near_multiples() -> None:
    with pytest.raises(LayoutError, match=r"18 tokens .* 2 x 4 .* multiple of 8, .* 16 or 24"):
        ContextSplit.zigzag(18, 4)
    with pytest.raises(LayoutError, match="for example 8"):
        ContextSplit.per_document(torch.zeros(1, 6, dtype=torch.int32), 4)


@st.composite
def packed(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Draws samples of documents of any length with padding, and a number of ranks."""
    ranks = draw(st.integers(1, 5))
    total = 2 * ranks * draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths, room = [], total
        while room and draw(st.booleans()):
            lengths.append(draw(st.integers(1, room)))
            room -= lengths[-1]
        rows.append(documents(lengths, total))
    return torch.cat(rows), ranks


@settings(max_examples=60, deadline=None)
@given(packed())
def test_every_index_is_on_one_rank_and_all_ranks_hold_equally_many(
    sample: tuple[torch.Tensor, int],
) -> None:
    ids, ranks = sample
    length = ids.shape[1]
    for split in (ContextSplit.zigzag(length, ranks), ContextSplit.per_document(ids, ranks)):
        assert (split.ranks, split.local_length, split.length) == (ranks, length // ranks, length)
        for row in range(split.indices.shape[1]):
            assert sorted(split.indices[:, row].flatten().tolist()) == list(range(length))
        assert bool((split.indices.diff(dim=2) > 0).all())
        own = [split.take(ids, rank) for rank in range(ranks)]
        whole = split.to_sequence_order(torch.cat(own, 1).t()[..., None])
        assert torch.equal(whole[..., 0].t(), ids)
        assert torch.equal(split.to_rank_order(whole)[..., 0].t(), torch.cat(own, 1))


@settings(max_examples=60, deadline=None)
@given(
    packed(),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.sampled_from([None, None, 1, 2, 5]),
)
def test_the_blocks_of_a_ring_cover_the_mask(
    sample: tuple[torch.Tensor, int],
    window: int | None,
    causal: bool,
    prefix: int | None,
    chunk: int | None,
) -> None:
    """Each allowed pair is in exactly one block, and no other pair is in any."""
    ids, ranks = sample
    b, length = ids.shape
    mask = SequenceMask(ids, causal=causal, window=window, prefix=prefix, chunk=chunk)
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    wanted = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    if causal:
        wanted &= (key <= query) | (key < (prefix or 0))
    if window is not None:
        wanted &= (query - key).abs() < window
    if chunk is not None:
        wanted &= query // chunk == key // chunk
    for split in (ContextSplit.zigzag(length, ranks), ContextSplit.per_document(ids, ranks)):
        found = torch.zeros(b, length, length, dtype=torch.int64)
        for rank in range(ranks):
            plan = plan_ring(mask, split, rank)
            for blocks in plan.blocks:
                for block in blocks:
                    allowed = block.mask.allowed().expand(b, -1, -1)
                    assert not block.mask.all_allowed or bool(allowed.all())
                    rows, columns = block.mask.query_indices, block.mask.key_indices
                    for i in range(b):
                        q, k = rows[i % len(rows)], columns[i % len(columns)]
                        found[i, q[:, None], k[None, :]] += allowed[i]
        assert torch.equal(found, wanted.long())


@pytest.mark.parametrize("rules", [{}, {"window": 9}, {"chunk": 16}, {"prefix": 3}], ids=str)
@pytest.mark.parametrize("joined", [1, 2])
def test_a_plan_from_ranges_equals_the_plan_from_indices(
    rules: dict[str, int], joined: int
) -> None:
    split = ContextSplit.zigzag(64, 4).joined(joined)
    assert split.ranges is not None
    listed = [[i for each in own for i in each] for own in split.ranges]
    assert listed == split.indices[:, 0].tolist()
    for rank in range(split.ranks):
        found, truth = (
            [
                [(b.rows, b.columns, b.mask.all_allowed) for b in blocks]
                for blocks in plan_ring(SequenceMask(**rules), each, rank).blocks
            ]
            for each in (split, ContextSplit(split.indices))
        )
        assert found == truth


@pytest.mark.gpu
def test_a_plan_waits_for_the_device_only_if_the_host_lacks_the_documents(
    device: torch.device, device_waits: Callable[[], AbstractContextManager[Counter[str]]]
) -> None:
    ids = documents([40, 24], 64).to(device)
    with device_waits() as waits:
        split = ContextSplit.zigzag(64, 4, device)
        plan_ring(SequenceMask(window=9), split, 1)
        plan_ring(SequenceMask(), split.joined(2), 1)
        split.within(2, 1)
    assert waits == Counter()
    with device_waits() as waits:
        plan_ring(SequenceMask(ids), split, 1)
        plan_ring(SequenceMask(ids), ContextSplit.per_document(ids, 4), 1)
    assert waits.total() == 2
    splits = (
        ContextSplit.zigzag(64, 4).with_documents(ids.cpu()),
        ContextSplit.per_document(ids.cpu(), 4),
    )
    with device_waits() as waits:
        for known in splits:
            plan_ring(SequenceMask(ids), known.to(device), 1)
            plan_ring(SequenceMask(ids, window=9), known.to(device).joined(2), 1)
    assert waits == Counter()


@pytest.mark.parametrize("window", [None, 9])
def test_a_plan_from_documents_on_the_host_equals_that_of_the_mask(window: int | None) -> None:
    ids = torch.cat([documents([40, 24], 64), documents([10, 3, 51], 64)])
    mask = SequenceMask(ids, window=window)
    for split in (
        ContextSplit.zigzag(64, 4).with_documents(ids),
        ContextSplit.per_document(ids, 4),
    ):
        assert split.host is not None
        for each, rank in ((split, 0), (split, 3), (split.joined(2), 1)):
            found, truth = (
                [
                    [(b.rows, b.columns, b.mask.all_allowed) for b in blocks]
                    for blocks in plan_ring(mask, one, rank).blocks
                ]
                for one in (each, ContextSplit(each.indices))
            )
            assert found == truth


def test_a_causal_ring_computes_half_of_the_pairs_and_needs_no_mask_for_most() -> None:
    """Fully masked blocks are skipped, and each rank has equal work in each step.

    A kernel for triangles computes half of the square of a rank's own tokens.
    """
    split = ContextSplit.zigzag(64, 4)
    for rank in range(4):
        plan = plan_ring(SequenceMask(), split, rank)
        for source, blocks in enumerate(plan.blocks):
            sizes = [
                (b.rows.stop - b.rows.start) * (b.columns.stop - b.columns.start) for b in blocks
            ]
            if source == rank:
                assert sizes == [16 * 16] and blocks[0].mask.triangular
                assert torch.equal(blocks[0].mask.allowed()[0], torch.ones(16, 16).tril() > 0)
            else:
                assert sizes == [2 * 8 * 8] and blocks[0].mask.all_allowed


def test_own_tokens_are_no_triangle_under_other_rules() -> None:
    split = ContextSplit.zigzag(64, 4)
    positions = torch.arange(64).flip(0)[None]
    rules = (
        SequenceMask(torch.zeros(1, 64, dtype=torch.int32)),
        SequenceMask(positions=positions),
        SequenceMask(causal=False),
        SequenceMask(window=64),
        SequenceMask(chunk=64),
        SequenceMask(prefix=1),
    )
    for mask in rules:
        blocks = plan_ring(mask, split, 1).blocks
        assert not any(block.mask.triangular for own in blocks for block in own)


def test_no_mask_is_needed_inside_one_document_and_padding_is_skipped() -> None:
    split = ContextSplit.zigzag(64, 4)
    for number in (0, 1, -1):
        ids = torch.full((1, 64), number)
        plan = plan_ring(SequenceMask(ids), split, 0)
        whole = [block.mask.all_allowed for blocks in plan.blocks[1:] for block in blocks]
        assert whole == ([] if number < 0 else [True] * 3)


@pytest.mark.parametrize(
    ("mask", "whole"),
    [
        (SequenceMask(), [True]),
        (SequenceMask(causal=False), [True]),
        (SequenceMask(window=56), [True]),
        (SequenceMask(window=55), [False]),  # of the tokens 63 and 8
        (SequenceMask(chunk=64), [True]),
        (SequenceMask(chunk=56), []),
        (SequenceMask(chunk=12), [False]),  # the tokens 60 to 63 are in another chunk
        (SequenceMask(chunk=16, causal=False), [True, True]),
        (SequenceMask(chunk=12, causal=False), [False, False]),
        (SequenceMask(prefix=8), [True]),
        (SequenceMask(prefix=9), [False, True]),  # the token 8 is visible to all
    ],
    ids=str,
)
def test_blocks_that_need_no_mask_are_known(mask: SequenceMask, whole: list[bool]) -> None:
    """Rank 0 of 4 has the tokens 0 to 7 and 56 to 63; rank 1 has 8 to 15 and 48 to 55."""
    split = ContextSplit.zigzag(64, 4)
    for each in (split, ContextSplit(split.indices)):
        blocks = plan_ring(mask, each, 0).blocks[1]
        assert [block.mask.all_allowed for block in blocks] == whole


def test_blocks_of_different_documents_are_skipped() -> None:
    ids = documents([1024] * 4, 4096)
    split = ContextSplit.zigzag(4096, 2)
    blocks = plan_ring(SequenceMask(ids), split, 0).blocks[1]
    assert blocks == ()  # slices 0 and 3 hold other documents than slices 1 and 2


def test_attention_pairs_equal_those_of_the_mask() -> None:
    ids = torch.cat([documents([5, 9], 16), documents([16], 16)])
    mask = SequenceMask(ids)
    for split in (ContextSplit.zigzag(16, 2), ContextSplit.per_document(ids, 2)):
        everything = torch.arange(16)[None]
        by_mask = [
            mask.block(split.indices[rank], everything).allowed().sum().item() for rank in range(2)
        ]
        assert attention_pairs(split, ids).tolist() == by_mask
    assert imbalance(torch.tensor([1.0, 3.0], dtype=torch.float64)) == 1.5


def test_zigzag_balances_one_document_and_per_document_balances_many() -> None:
    lengths = [700, 90, 1500, 33, 411, 1200, 162]
    ids = documents(lengths, 4096)
    zigzag, per_document = ContextSplit.zigzag(4096, 4), ContextSplit.per_document(ids, 4)
    assert imbalance(attention_pairs(zigzag)) == 1.0
    assert imbalance(attention_pairs(zigzag, ids)) > 1.2
    assert imbalance(attention_pairs(per_document, ids)) < 1.001


def test_a_rank_drops_the_same_elements_as_one_rank() -> None:
    samples, shape = torch.tensor([4, 9]), (16, 2, 3)
    key = DropoutKey.for_batch(seed=1, iteration=2, samples=samples, positions=16)
    whole = keep_mask(shape, 0.5, key, layer=3, site=1).transpose(0, 1)
    ids = torch.cat([documents([5, 9], 16), documents([16], 16)])
    for split in (ContextSplit.zigzag(16, 2), ContextSplit.per_document(ids, 2)):
        for rank in range(2):
            own = keep_mask((8, 2, 3), 0.5, key.select(split.indices[rank]), layer=3, site=1)
            assert torch.equal(own.transpose(0, 1), split.take(whole, rank))


def test_a_hierarchy_nests_its_groups() -> None:
    layout = ParallelLayout(tp=2, cp=4, dp=1, hierarchical_cp=(2, 2))
    assert layout.groups("cp")[0] == (0, 2, 4, 6)
    assert layout.groups("cp_inner") == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert layout.groups("cp_outer") == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert layout.group_of("cp_inner", 5) == (5, 7) and layout.group_of("cp_outer", 5) == (1, 5)
    assert {"cp_inner", "cp_outer"} <= set(layout.group_names)
    assert "cp 2 inside x 2 outside" in draw_layout(layout)
    assert "cp_inner" not in ParallelLayout(cp=4).resolve(4).group_names
    with pytest.raises(LayoutError, match=r"hierarchical_cp=\(2, 3\) .* cp=4"):
        ParallelLayout(cp=4, hierarchical_cp=(2, 3))
    with pytest.raises(LayoutError, match="there is no 'cp_inner' group: set hierarchical_cp"):
        ParallelLayout(cp=4).resolve(4).groups("cp_inner")


def test_within_indexes_the_tokens_of_the_group() -> None:
    split = ContextSplit.zigzag(16, 4)
    joined, within = split.joined(2), split.within(2, 1)
    assert joined.indices[1, 0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    for rank in range(2):
        assert torch.equal(joined.indices[1, :, within.indices[rank, 0]], split.indices[2 + rank])
