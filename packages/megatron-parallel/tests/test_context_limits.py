"""Context parallelism at its limits: lengths, pools, masks by hand, and a ring of one rank."""

import math

import pytest
import torch
from megatron_parallel import LayoutError, Mesh
from megatron_parallel.context_parallel import (
    ContextSplit,
    PoolPlan,
    PoolRow,
    SequenceMask,
    attention_pairs,
    check_heads,
    imbalance,
    plan_pool,
    plan_ring,
    ring_attention,
)
from megatron_parallel.context_parallel.plain import PlainBlocks
from megatron_parallel.context_parallel.pool import check_pool
from megatron_parallel.context_parallel.split import check_length
from torch import Tensor


@pytest.mark.parametrize(
    ("length", "ranks", "near"),
    [(1, 1, "2"), (7, 4, "8"), (9, 4, "8 or 16"), (15, 2, "12 or 16"), (20, 8, "16 or 32")],
)
def test_lengths_that_do_not_divide_are_refused(length: int, ranks: int, near: str) -> None:
    with pytest.raises(LayoutError, match=rf"a multiple of {2 * ranks}, for example {near}$"):
        check_length(length, ranks)
    for number in near.split(" or "):
        check_length(int(number), ranks)


def test_heads_and_pools_that_just_fit() -> None:
    check_heads(4, 4)
    check_heads(8, 4)
    check_pool(32, 4, 9)  # 8 tokens on each of 4 ranks
    check_pool(2, 1, 2)
    check_pool(0, 2, 3, multiple=3)
    for arguments, message in (
        ((33, 4, 9), "they hold 32"),
        ((1, 0, 9), "a pool of 0 ranks"),
        ((1, 6, 9), "a pool of 6 ranks"),
        ((1, -2, 9), "a pool of -2 ranks"),
        ((1, 2, 1), "less than the multiple 2"),
        ((1, 2, 3, 4), "less than the multiple 4"),
    ):
        with pytest.raises(LayoutError, match=message):
            check_pool(*arguments)


@pytest.mark.parametrize(
    ("length", "size", "padded"),
    [(1, 1, 2), (16, 1, 16), (17, 2, 20), (32, 2, 32), (33, 4, 40), (64, 4, 64)],
)
def test_a_document_is_on_as_few_ranks_as_hold_it(length: int, size: int, padded: int) -> None:
    plan = plan_pool([length] * (4 // size), pool=4, capacity=16)
    assert plan.imbalance == 1.0 and len(plan.rows) == 4 // size
    for row in plan.rows:
        assert (len(row.ranks), row.tokens, row.padded_length) == (size, length, padded)


def test_numbers_of_a_plan_follow_from_its_rows() -> None:
    rows = (
        PoolRow(range(4), (0,), 40, 40, 10.0),
        PoolRow(range(2), (1, 2), 12, 16, 6.0),
        PoolRow(range(3, 4), (3,), 8, 8, 8.0),
    )
    plan = PoolPlan(4, rows)
    assert plan.work == (16.0, 16.0, 10.0, 18.0)
    assert plan.imbalance == 18.0 * 4 / 60.0
    assert plan.sends_per_token == (3 * 40 + 1 * 12) / 60
    assert plan.rows_per_rank == 2
    assert plan.rows_of(2) == (rows[0], None) and plan.rows_of(3) == (rows[0], rows[2])
    assert str(plan) == (
        "documents: 1 unsplit, 2 over 2 ranks, 1 over 4 ranks; micro-batches on each of 4 ranks: "
        "2; work of the busiest rank: 1.20 of the average"
    )
    assert str(PoolPlan(2, ())).startswith("documents: none; micro-batches on each of 2 ranks: 1;")


def grid(*rows: str) -> list[list[bool]]:
    return [[letter == "x" for letter in row] for row in rows]


MASKS = {
    "chunk": (SequenceMask(chunk=2), grid("x....", "xx...", "..x..", "..xx.", "....x")),
    "window": (SequenceMask(window=2), grid("x....", "xx...", ".xx..", "..xx.", "...xx")),
    "both": (
        SequenceMask(causal=False, window=2),
        grid("xx...", "xxx..", ".xxx.", "..xxx", "...xx"),
    ),
    "prefix": (SequenceMask(prefix=2), grid("xx...", "xx...", "xxx..", "xxxx.", "xxxxx")),
    "tensor": (
        SequenceMask(prefix=torch.tensor([3])),
        grid("xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx"),
    ),
    "documents": (
        SequenceMask(torch.tensor([[0, 0, 7, 7, -1]])),
        grid("x....", "xx...", "..x..", "..xx.", "....."),
    ),
    "positions": (
        SequenceMask(positions=torch.tensor([[0, 1, 0, 1, 2]])),
        grid("x.x..", "xxxx.", "x.x..", "xxxx.", "xxxxx"),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_by_hand(name: str) -> None:
    mask, allowed = MASKS[name]
    places = torch.arange(5)[None]
    block = mask.block(places, places)
    assert block.allowed()[0].tolist() == allowed
    assert not block.all_allowed and not block.triangular


def test_documents_are_cut_into_tiles_of_at_least_128_tokens() -> None:
    for length, tile in ((1024, 128), (1016, 254), (2048, 128)):
        ids = torch.arange(length)[None] // 128
        plan = plan_ring(SequenceMask(ids), ContextSplit.zigzag(length, 2), 0)
        sizes = {block.rows.stop - block.rows.start for block in plan.blocks[0]}
        assert sizes == {tile}
    plain = plan_ring(SequenceMask(prefix=5), ContextSplit.zigzag(2048, 2), 0)
    assert {block.rows.stop - block.rows.start for block in plain.blocks[0]} == {512}


def test_pairs_of_a_whole_sequence_are_a_triangle() -> None:
    whole = attention_pairs(ContextSplit.zigzag(16, 1))
    assert whole.tolist() == [16 * 17 / 2] and imbalance(whole) == 1.0
    halves = ContextSplit(torch.arange(16).view(2, 1, -1))
    assert attention_pairs(halves).tolist() == [36.0, 100.0]
    assert imbalance(attention_pairs(halves)) == 100 / 68
    padding = torch.tensor([[0] * 8 + [-1] * 8])
    assert attention_pairs(halves, padding).tolist() == [36.0, 0.0]


def inputs(width: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((8, 2, 4, width), (8, 2, 2, width), (8, 2, 2, width))
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )


def by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns causal attention and the log-sum-exp of the scores."""
    keys, values = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, keys) * scale
    scores = scores.masked_fill(torch.ones(8, 8).triu(1) > 0, -torch.inf)
    out = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1).permute(2, 0, 1)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_ring_of_one_rank_is_attention(single: Mesh, scale: float | None) -> None:
    split = ContextSplit.zigzag(8, 1)
    plan = plan_ring(SequenceMask(), split, 0)
    used = 1 / math.sqrt(4) if scale is None else scale
    blocks = PlainBlocks(scale)
    found, wanted = inputs(), inputs()
    out = ring_attention(*found, plan, single.axis("cp"), blocks)
    truth, lse = by_torch(*wanted, used)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-14)
    (block,) = plan.blocks[0]
    forward = blocks.forward(*(t.detach() for t in found), block.mask)
    torch.testing.assert_close(forward[1], lse.detach(), rtol=0, atol=1e-14)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    for result in (out, truth):
        (result * weights).sum().backward()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13)


def test_a_ring_of_another_length_is_refused(single: Mesh) -> None:
    q, k, v = (t[:6] for t in inputs())
    plan = plan_ring(SequenceMask(), ContextSplit.zigzag(8, 1), 0)
    with pytest.raises(LayoutError, match=r"1 ranks with 8 tokens each, not for 6 tokens on axis"):
        ring_attention(q, k, v, plan, single.axis("cp"))


def test_documents_share_ranks_by_hand() -> None:
    """30 tokens need two ranks; the others go to the rank with less work, the longest first."""
    plan = plan_pool([30, 9, 8, 7, 6], pool=4, capacity=16)
    assert plan.rows == (
        PoolRow(range(2), (0,), 30, 32, 15.0),
        PoolRow(range(2, 3), (1, 4), 15, 16, 15.0),
        PoolRow(range(3, 4), (2, 3), 15, 16, 15.0),
    )
    # A row takes the longest documents first, each where it just fits.
    rows = plan_pool([10, 9, 6, 5, 2], pool=1, capacity=16).rows
    assert [row.documents for row in rows] == [(0, 2), (1, 3, 4)]


def test_a_document_is_cut_only_if_that_balances_the_work() -> None:
    # 8 and 4: uncut 8 : 4; the first cut 8 : 4; both cut 6 : 6, with two slices of 1 on each rank.
    both = plan_pool([8, 4], pool=2, capacity=100)
    assert both.rows == (PoolRow(range(2), (0, 1), 12, 12, 6.0),) and both.imbalance == 1.0
    # A document of 2 is too short for four slices.
    first = plan_pool([8, 2], pool=2, capacity=100)
    assert [(len(row.ranks), row.documents) for row in first.rows] == [(2, (0,)), (1, (1,))]
    assert first.imbalance == 1.2
    # Up to 1.05 times the average work, nothing is cut: 21 of 20, but not 22.
    for lengths, sizes in (([21, 19], [1, 1]), ([22, 18], [2])):
        rows = plan_pool(lengths, pool=2, capacity=100).rows
        assert [len(row.ranks) for row in rows] == sizes
    equal = plan_pool([6, 6], pool=2, capacity=100)
    assert [len(row.ranks) for row in equal.rows] == [1, 1]
    # Work of a pair of tokens: 4 + 10 pairs, and twice 2 + 3 pairs.
    pairs = plan_pool([4, 2, 2], pool=1, capacity=8, tokens_per_pair=0.5)
    assert pairs.work == (4 + 5 + 2 * (2 + 1.5),)


def test_tokens_that_do_not_fill_slices_are_distributed_back_and_forth() -> None:
    """Documents of 10 and 2 tokens over 2 ranks: 4 slices of 2, and a rest of 2 tokens each."""
    ids = torch.tensor([[0] * 10 + [1] * 2])
    split = ContextSplit.per_document(ids, 2)
    assert split.indices[:, 0].tolist() == [[0, 2, 3, 8, 9, 11], [1, 4, 5, 6, 7, 10]]
    assert (split.ranks, split.local_length, split.length) == (2, 6, 12)
    assert split.host is not None and split.host.document_ids is ids
    assert ContextSplit.zigzag(12, 2).host is None and ContextSplit.zigzag(12, 2).ranges == (
        (range(3), range(9, 12)),
        (range(3, 6), range(6, 9)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_keys_are_zero_and_have_no_gradient(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0] * 6 + [-1] * 2] * 2)
    block = plan_ring(SequenceMask(ids), ContextSplit.zigzag(8, 1), 0).blocks[0][-1]
    assert (block.rows, block.columns) == (slice(4, 8), slice(0, 8))
    q, k, v = (t.detach().to(dtype) for t in inputs())
    q, k, v = q[block.rows], k[block.columns], v[block.columns]
    blocks = PlainBlocks()
    out, lse = blocks.forward(q, k, v, block.mask)
    assert out.dtype == dtype and lse.dtype == torch.float32
    padded = ids[0, block.rows] < 0
    assert torch.isneginf(lse[padded]).all() and not out[padded].any()
    gradients = blocks.backward(torch.ones_like(out), q, k, v, out, lse, block.mask)
    assert all(g.dtype == dtype and g.isfinite().all() for g in gradients)
    assert not gradients[0][padded].any()
