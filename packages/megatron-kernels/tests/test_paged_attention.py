"""Attention over blocks: values, masks, what is read in place, bits, and errors."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import KernelError, Pages, Scores, paged_attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

BLOCK = 4


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_blocks(
    sequences: list[Tensor], order: list[int], spare: float = torch.nan
) -> tuple[Tensor, Tensor]:
    """Returns a pool and tables of sequences `[t, g, d]`; unused entries are not numbers."""
    counts = [-(-len(each) // BLOCK) for each in sequences]
    pool = torch.full((len(order) + 1, BLOCK, *sequences[0].shape[1:]), spare, dtype=torch.float64)
    tables = torch.full((len(sequences), max(1, *counts)), len(order), dtype=torch.int32)
    free = iter(order)
    for row, keys in enumerate(sequences):
        for column in range(counts[row]):
            block = next(free)
            part = keys[column * BLOCK : (column + 1) * BLOCK]
            pool[block, : len(part)] = part
            tables[row, column] = block
    return pool, tables


def by_hand(q: Tensor, k: Tensor, v: Tensor, window: int | None, scores: Scores) -> Tensor:
    """Computes the last tokens of one sequence, number by number of a query and a head."""
    new, heads, d = q.shape
    out = torch.zeros(new, heads, v.shape[-1], dtype=torch.float64)
    for i in range(new):
        position = len(k) - new + i
        first = 0 if window is None else max(0, position - window + 1)
        if position < first:
            continue
        for head in range(heads):
            group = head * k.shape[1] // heads
            keys = k[first : position + 1, group]
            found = keys @ q[i, head] * (scores.scale or 1 / math.sqrt(d))
            if scores.softcap:
                found = scores.softcap * torch.tanh(found / scores.softcap)
            if scores.slopes is not None:
                found = found - scores.slopes[head] * torch.arange(len(keys) - 1, -1, -1)
            weights = found.exp()
            total = weights.sum()
            if scores.sinks is not None:
                total = total + scores.sinks[head].exp()
            out[i, head] = weights @ v[first : position + 1, group] / total
    return out


SCORES = {
    "plain": Scores(),
    "scale": Scores(scale=0.4),
    "soft-cap and slopes": Scores(softcap=2.0, slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "sinks": Scores(sinks=torch.tensor([0.5, -1.0, 0.0, 2.0])),
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(sorted(SCORES)),
    st.randoms(use_true_random=False),
)
def test_values_equal_those_of_each_sequence_by_hand(
    lengths: list[int], new: int, groups: int, window: int | None, kind: str, random: Any
) -> None:
    order = list(range(sum(-(-length // BLOCK) for length in lengths)))
    if random.random() < 0.5:
        random.shuffle(order)
    keys, values = (
        [drawn(seed + row, length, groups, 8) for row, length in enumerate(lengths)]
        for seed in (10, 20)
    )
    q = drawn(1, new, len(lengths), 4, 8)
    rows = zip(q.unbind(1), keys, values, strict=True)
    expected = torch.stack([by_hand(*row, window, SCORES[kind]) for row in rows], 1)
    k, tables = in_blocks(keys, order, spare=7.0)
    v, _ = in_blocks(values, order, spare=7.0)
    pages = Pages(tables, torch.tensor(lengths, dtype=torch.int32))
    for backend in ("auto", "reference"):
        found = paged_attention(q, k, v, pages, window, SCORES[kind], backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # of float32 sinks


@pytest.mark.parametrize("lengths", [(9, 9, 9), (9, 5, 12), (4, 0, 8)])
def test_blocks_in_a_row_are_read_in_place(lengths: tuple[int, ...]) -> None:
    starts = (1, 4, 7)
    q, k, v = drawn(1, 2, 3, 4, 8), drawn(2, 10, BLOCK, 2, 8), drawn(3, 10, BLOCK, 2, 8)
    k[0] = v[0] = torch.nan  # a block of no sequence
    known = Pages.consecutive(starts, lengths, BLOCK)
    read = Pages(known.tables, known.lengths)
    assert read.known_runs(BLOCK) == known.runs
    expected = paged_attention(q, k, v, read, backend="reference")
    with mock.patch.object(Pages, "gather", side_effect=AssertionError("gathered")):
        for pages in (known, read):
            found = paged_attention(q, k, v, pages, backend="torch")
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        scattered = Pages(known.tables.flip(1), known.lengths)
        with pytest.raises(AssertionError, match="gathered"):
            paged_attention(q, k, v, scattered, backend="torch")


def test_sequences_at_the_end_of_a_pool_are_read_in_place_or_gathered() -> None:
    q, k, v = drawn(1, 1, 2, 2, 8), drawn(2, 4, BLOCK, 2, 8), drawn(3, 4, BLOCK, 2, 8)
    true = torch.nn.functional.scaled_dot_product_attention
    # One call if a view has all sequences: equally long ones at equal distances.
    for starts, lengths, calls in (
        ((0, 2), (8, 8), 1),
        ((2, 0), (8, 8), 2),
        ((1, 1), (8, 8), 1),
        ((2, 2), (8, 8), 1),
        ((0, 2), (8, 7), 2),
    ):
        pages = Pages.consecutive(starts, lengths, BLOCK)
        expected = paged_attention(q, k, v, pages, backend="reference")
        with mock.patch.object(
            torch.nn.functional, "scaled_dot_product_attention", side_effect=true
        ) as called:
            found = paged_attention(q, k, v, pages, backend="torch")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert called.call_count == calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariant_rows_have_the_bits_of_one_sequence_alone(dtype: torch.dtype) -> None:
    lengths = (130, 7, 300)
    k, v = (drawn(seed, 3 * 75, BLOCK, 2, 16, dtype=dtype) for seed in (2, 3))
    q = drawn(1, 3, 3, 4, 16, dtype=dtype)
    pages = Pages.consecutive((0, 75, 150), lengths, BLOCK)

    def of(pages: Pages, q: Tensor) -> Tensor:
        return paged_attention(q, k, v, pages, backend="batch-invariant")

    whole = of(pages, q)
    for row, length in enumerate(lengths):
        alone = Pages.consecutive((75 * row,), (length,), BLOCK)
        assert torch.equal(of(alone, q[:, row : row + 1]), whole[:, row : row + 1])
        earlier = Pages.consecutive((75 * row,), (length - 1,), BLOCK)
        one = of(earlier, q[1:2, row : row + 1])
        assert torch.equal(one, whole[1:2, row : row + 1])


def test_blocks_in_a_row_are_those_of_their_own_sequence() -> None:
    pages = Pages.consecutive((1, 0, 7), (5, 0, 12), BLOCK)
    assert pages.tables.tolist() == [[1, 2, 2], [0, 0, 0], [7, 8, 9]]
    assert pages.lengths.tolist() == [5, 0, 12] and pages.runs == ((1, 5), (0, 0), (7, 12))
    none = Pages.consecutive((), (), BLOCK)
    assert none.tables.shape == (0, 0) and none.lengths.shape == (0,)


def test_pages_that_do_not_fit_are_refused() -> None:
    q, pool = drawn(1, 1, 2, 4, 8), drawn(2, 3, BLOCK, 2, 8)
    tables, lengths = torch.tensor([[0, 1], [2, 0]]).int(), torch.tensor([6, 3]).int()

    def refused(match: str, *changed: Any, **others: Any) -> None:
        with pytest.raises(KernelError, match=match):
            paged_attention(*changed, **others)

    pages = Pages(tables, lengths)
    narrow = pool[..., :6]  # values may have fewer channels than keys
    assert paged_attention(q, pool, narrow, pages).shape == (1, 2, 4, 6)
    paged_attention(q, pool, pool, Pages(tables, torch.tensor([8, 8]).int()))  # full blocks
    refused("blocks -1 to 1, but the pool has", q, pool, pool, Pages(tables - 1, lengths))
    refused(r"are not of 2 sequences", q, pool, pool, Pages(tables[:1], lengths[:1]))
    refused(r"9 keys do not fit into 2 blocks", q, pool, pool, Pages(tables, lengths + 3))
    refused(r"blocks 0 to 3, but the pool has", q, pool, pool, Pages(tables + tables // 2, lengths))
    refused("3 heads do not divide over 2", q[:, :, :3], pool, pool, pages)
    refused("window is 0; use at least 1", q, pool, pool, pages, 0)
    refused("have a bias", q, pool, pool, pages, None, Scores(bias=torch.zeros(1, 4, 1, 6)))
    refused("sinks have shape", q, pool, pool, pages, None, Scores(sinks=torch.zeros(3)))
    refused("must agree", q, pool.float(), pool.float(), pages, backend="torch")


@pytest.mark.parametrize("backend", ["torch", "batch-invariant", "reference"])
def test_sequences_without_blocks_have_zeros(backend: str) -> None:
    q, pool = drawn(1, 2, 3, 4, 8), drawn(2, 5, BLOCK, 2, 8)
    read = Pages(torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32))
    for pages in (read, Pages.consecutive((4, 0, 2), (0, 0, 0), BLOCK)):
        assert pages.tables.shape == (3, 0)
        found = paged_attention(q, pool, pool[..., :6], pages, backend=backend)
        assert found.shape == (2, 3, 4, 6) and not found.any()


@pytest.mark.parametrize("backend", ["torch", "batch-invariant", "reference"])
def test_a_batch_without_sequences_has_no_outputs(backend: str) -> None:
    q, pool = drawn(1, 2, 0, 4, 8), drawn(2, 5, BLOCK, 2, 8)
    pages = Pages.consecutive((), (), BLOCK)
    for each in (pages, Pages(pages.tables, pages.lengths)):
        assert paged_attention(q, pool, pool, each, backend=backend).shape == (2, 0, 4, 8)


def test_the_host_reads_only_tables_with_values_outside_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables, lengths = torch.tensor([[1, 2], [4, 0]]).int(), torch.tensor([5, 3]).int()
    assert Pages(tables, lengths).known_runs(BLOCK) == ((1, 5), (4, 3))
    assert Pages(tables.to("meta"), lengths.to("meta")).known_runs(BLOCK) is None
    with FakeTensorMode() as mode:
        imagined = Pages(*(mode.from_tensor(each) for each in (tables, lengths)))
        assert imagined.known_runs(BLOCK) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert Pages(tables, lengths).known_runs(BLOCK) is None


@pytest.mark.parametrize("scores", [{"slopes": torch.zeros(3)}, {"sinks": torch.zeros(5)}], ids=str)
def test_numbers_of_heads_are_one_for_each_head(scores: dict[str, Tensor]) -> None:
    (name,), (wrong,) = scores, scores.values()
    q, pool = drawn(1, 1, 2, 4, 8), drawn(2, 3, BLOCK, 2, 8)
    pages = Pages.consecutive((0, 1), (3, 2), BLOCK)
    with pytest.raises(
        KernelError, match=rf"{name} have shape \[{len(wrong)}\]; 4 heads need \[4\]"
    ):
        paged_attention(q, pool, pool, pages, None, Scores(**scores))
