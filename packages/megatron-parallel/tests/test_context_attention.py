"""Attention over context-parallel ranks equals dense attention on one rank, in both passes."""

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.context_parallel import (
    ContextSplit,
    RingPlan,
    SequenceMask,
    all_gather_attention,
    all_to_all_attention,
    check_heads,
    hierarchical_attention,
    plan_ring,
    ring,
    ring_attention,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor

LENGTH, BATCH, HEADS, DIM = 32, 2, 8, 4
TOLERANCE = 1e-13
IDS = torch.tensor(
    [[0] * 9 + [1] * 4 + [2] * 16 + [-1] * 3, [0] * 2 + [1] * 20 + [2] * 10], dtype=torch.int32
)
MASKS = {
    "causal": SequenceMask(),
    "full": SequenceMask(causal=False),
    "documents": SequenceMask(IDS),
    "full in documents": SequenceMask(IDS, causal=False),
    "window": SequenceMask(window=5),
    "chunk": SequenceMask(IDS, chunk=6),
    "prefix": SequenceMask(prefix=torch.tensor([3, 7])),
}
LAYOUTS = {
    "cp2": ParallelLayout(cp=2, dp=1),
    "cp4": ParallelLayout(cp=4, dp=1, hierarchical_cp=(2, 2)),
}


def data(groups: int, value_dim: int = DIM) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys, values and output gradient of the whole sequence."""
    generator = torch.Generator().manual_seed(groups)
    shapes = ((HEADS, DIM), (groups, DIM), (groups, value_dim), (HEADS, value_dim))
    q, k, v, dout = (
        torch.randn(LENGTH, BATCH, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    )
    return q, k, v, dout


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Returns dense attention, computed from all scores."""
    copies = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(copies, 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~allowed[:, None], -torch.inf)
    p = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("bnst,tbnd->sbnd", p, v)


def truth(mask: SequenceMask, groups: int, value_dim: int = DIM) -> list[Tensor]:
    """Returns output and gradients on one rank."""
    q, k, v, dout = data(groups, value_dim)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    places = torch.arange(LENGTH)[None]
    out = dense(*leaves, mask.block(places, places).allowed())
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def attention_of(
    way: str, mesh: Mesh, mask: SequenceMask, split: ContextSplit, plan: RingPlan | None = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    axis, places = mesh.axis("cp"), torch.arange(LENGTH)[None]

    def among(queries: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: dense(q, k, v, mask.block(queries, places).allowed())

    if way == "ring":
        blocks = plan_ring(mask, split, axis.index) if plan is None else plan
        return lambda q, k, v: ring_attention(q, k, v, blocks, axis)
    if way == "heads":
        return lambda q, k, v: all_to_all_attention(q, k, v, split, axis, among(places))
    if way == "gathered":
        attend = among(split.indices[axis.index])
        return lambda q, k, v: all_gather_attention(q, k, v, split, axis, attend)
    inner, outer = mesh.axis("cp_inner"), mesh.axis("cp_outer")
    joined = plan_ring(mask, split.joined(inner.size), outer.index)
    within = split.within(inner.size, outer.index)
    return lambda q, k, v: hierarchical_attention(q, k, v, within, joined, inner, outer)


def errors(
    mesh: Mesh,
    way: str,
    mask: SequenceMask,
    split: ContextSplit,
    groups: int,
    wide: int = DIM,
    plan: RingPlan | None = None,
) -> float:
    """Returns the largest differences of this rank's output and gradients from one rank."""
    rank = mesh.axis("cp").index

    def own(t: Tensor) -> Tensor:
        return split.take(t.transpose(0, 1), rank).transpose(0, 1)

    *inputs, dout = (own(t).requires_grad_() for t in data(groups, wide))
    out = attention_of(way, mesh, mask, split, plan)(*inputs)
    found = [out.detach(), *torch.autograd.grad(out, inputs, dout.detach())]
    wanted = [own(t) for t in truth(mask, groups, wide)]
    return max(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True))


def all_errors(mesh: Mesh, names: list[str]) -> dict[str, float]:
    """Returns the errors of all kinds of attention, masks, splits and numbers of KV heads."""
    ranks = mesh.layout.cp
    ways = ["ring", "heads", "gathered"] + ["hierarchical"] * (mesh.has_axis("cp_inner"))
    splits = {
        "zigzag": ContextSplit.zigzag(LENGTH, ranks),
        "per document": ContextSplit.per_document(IDS, ranks),
    }
    found = {}
    for way in ways:
        for name in names:
            for kind, split in splits.items():
                found[f"{way}, {name}, {kind}"] = errors(mesh, way, MASKS[name], split, 4)
        for groups in (1, 2, 8):
            case = (way, MASKS["documents"], splits["zigzag"], groups)
            found[f"{way}, {groups} groups"] = errors(mesh, *case)
    for way in ("ring", "gathered"):
        found[f"{way}, wide values"] = errors(mesh, way, MASKS["causal"], splits["zigzag"], 4, 6)
    with patch.object(torch.compiler, "is_compiling", lambda: True):  # messages of a graph
        case = ("ring", MASKS["documents"], splits["zigzag"], 4)
        found["ring, for a compiler"] = errors(mesh, *case)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_attention_equals_one_rank(worker_pool: WorkerPool, layout: str) -> None:
    for found in worker_pool.run_mesh(LAYOUTS[layout], all_errors, list(MASKS)):
        wrong = {name: error for name, error in found.items() if not error < TOLERANCE}
        assert not wrong and len(found) > 40


def sink_errors(mesh: Mesh, way: str) -> float:
    """Returns the largest differences of output and gradients, those of sinks summed over ranks."""
    axis, split, mask = mesh.axis("cp"), ContextSplit.zigzag(LENGTH, 4), MASKS["documents"]
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    q, k, v, dout = data(4)
    whole = [t.requires_grad_() for t in (q, k, v, sinks)]
    places = torch.arange(LENGTH)[None]
    allowed = mask.block(places, places).allowed()[:, None]
    keys, values = (t.repeat_interleave(HEADS // 4, 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, keys) / DIM**0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    column = sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
    p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bnst,tbnd->sbnd", p, values)
    truth = [out.detach(), *torch.autograd.grad(out, whole, dout)]

    def own(t: Tensor) -> Tensor:
        return split.take(t.transpose(0, 1), axis.index).transpose(0, 1)

    inputs = [own(t.detach()).requires_grad_() for t in (q, k, v)]
    logits = sinks.detach().requires_grad_()
    if way == "ring":
        plan = plan_ring(mask, split, axis.index)
        found = ring_attention(*inputs, plan, axis, sinks=logits)
    else:
        inner, outer = mesh.axis("cp_inner"), mesh.axis("cp_outer")
        plan = plan_ring(mask, split.joined(inner.size), outer.index)
        within = split.within(inner.size, outer.index)
        part = logits.chunk(inner.size)[inner.index]
        found = hierarchical_attention(*inputs, within, plan, inner, outer, sinks=part)
    *grads, dsinks = torch.autograd.grad(found, [*inputs, logits], own(dout))
    dist.all_reduce(dsinks, group=axis.process_group)
    pairs = zip([found, *grads], [own(t) for t in truth[:4]], strict=True)
    return max(float((f - w).abs().max()) for f, w in [*pairs, (dsinks, truth[4])])


@pytest.mark.parametrize("way", ["ring", "hierarchical"])
def test_sinks_equal_one_rank(worker_pool: WorkerPool, way: str) -> None:
    assert max(worker_pool.run_mesh(LAYOUTS["cp4"], sink_errors, way)) < TOLERANCE


class Lost(ring._Message):
    """Gradients of keys and values that never reach their owner."""

    def wait(self) -> Tensor:
        return super().wait() * (not self.homeward)


true_merge = ring._merge


def added(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds the outputs of two blocks as if each were normalised over both."""
    out.add_(more)
    lse.copy_(torch.logaddexp(lse, more_lse))


def forgotten(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Keeps the log-sum-exp of the last block only."""
    true_merge(out, lse, more, more_lse)
    lse.copy_(more_lse)


@pytest.mark.parametrize(
    "defect", ["none", "added", "forgotten", "lost", "contiguous", "documents"]
)
def test_a_planted_defect_is_detected(worker_pool: WorkerPool, defect: str) -> None:
    def run(mesh: Mesh) -> float:
        split, mask, index = ContextSplit.zigzag(LENGTH, 2), MASKS["documents"], mesh.rank
        merge = {"added": added, "forgotten": forgotten}.get(defect, true_merge)
        plan = plan_ring(mask, split, index)
        if defect == "contiguous":  # the mask assumes that each rank has one half
            halves = ContextSplit(torch.arange(LENGTH).view(2, 1, -1))
            plan = RingPlan(split, plan_ring(mask, halves, index).blocks)
        if defect == "documents":  # document ids are cut into halves, tokens by zig-zag
            order = ContextSplit.zigzag(LENGTH, 2).indices.flatten().argsort()
            plan = plan_ring(SequenceMask(IDS[:, order]), split, index)
        with (
            patch.object(ring, "_merge", merge),
            patch.object(ring, "_Message", Lost if defect == "lost" else ring._Message),
        ):
            return errors(mesh, "ring", mask, split, 4, plan=plan)

    seen = max(worker_pool.run_mesh(LAYOUTS["cp2"], run))
    assert seen < TOLERANCE if defect == "none" else seen > 1e-3


def test_low_precision_inputs_are_summed_in_float32(worker_pool: WorkerPool) -> None:
    """bfloat16 in four blocks is as accurate as in one block."""

    def run(mesh: Mesh) -> float:
        split, axis = ContextSplit.zigzag(LENGTH, 4), mesh.axis("cp")
        q, k, v, dout = (
            split.take(t.transpose(0, 1), axis.index).transpose(0, 1).bfloat16() for t in data(4)
        )
        leaves = [t.requires_grad_() for t in (q, k, v)]
        plan = plan_ring(MASKS["causal"], split, axis.index)
        out = ring_attention(*leaves, plan, axis)
        grads = torch.autograd.grad(out, leaves, dout)
        assert {t.dtype for t in (out, *grads)} == {torch.bfloat16}
        wanted = [
            split.take(t.transpose(0, 1), axis.index).transpose(0, 1)
            for t in truth(MASKS["causal"], 4)
        ]
        return max(float((f - w).abs().max()) for f, w in zip((out, *grads), wanted, strict=True))

    assert max(worker_pool.run_mesh(LAYOUTS["cp4"], run)) < 0.05


def test_messages_of_each_kind_of_attention(worker_pool: WorkerPool) -> None:
    """Calls and bytes of a forward and a backward pass in float64."""

    def run(mesh: Mesh) -> dict[str, dict[tuple[str, str], tuple[int, int]]]:
        split = ContextSplit.zigzag(LENGTH, 4)
        counted = {}
        for way in ("ring", "heads", "gathered", "hierarchical"):
            with mesh.counting() as traffic:
                errors(mesh, way, MASKS["causal"], split, 2)
            counted[way] = {(r.axis, r.operation): (r.calls, r.nbytes) for r in traffic.records}
        return counted

    tokens = LENGTH // 4 * BATCH * DIM * 8  # bytes of one head for the tokens of one rank
    pair, steps = 2 * 2 * tokens, 3  # keys and values of 2 groups
    for counted in worker_pool.run_mesh(LAYOUTS["cp4"], run):
        there_and_back = {}
        for verb in ("send", "receive"):
            there_and_back["cp", f"{verb} of keys and values"] = (2 * steps, 2 * steps * pair)
            there_and_back["cp", f"{verb} of gradients of keys and values"] = (steps, steps * pair)
        assert counted["ring"] == there_and_back
        # queries, twice the two groups, output; the same in the backward pass
        moved = 2 * (HEADS + 2 * 4 + HEADS) * tokens
        assert counted["heads"] == {("cp", "all_to_all of heads"): (4, moved)}
        assert counted["gathered"] == {
            ("cp", "all_gather"): (1, pair),
            ("cp", "reduce_scatter"): (1, 4 * pair),
        }
        inner = 2 * (HEADS + 2 * 2 + HEADS) * tokens
        assert counted["hierarchical"]["cp_inner", "all_to_all of heads"] == (4, inner)
        # half of the heads for twice the tokens, one step of two ranks
        assert counted["hierarchical"]["cp_outer", "send of keys and values"] == (2, 2 * pair)


def test_inputs_that_do_not_fit_are_refused(single: Mesh) -> None:
    with pytest.raises(LayoutError, match=r"6 heads .* over 4 context-parallel ranks"):
        check_heads(6, 4)
    x, plan = torch.zeros(8, 1, 2, 4), plan_ring(SequenceMask(), ContextSplit.zigzag(16, 2), 0)
    with pytest.raises(
        LayoutError, match=r"2 ranks with 8 tokens each, not for 8 tokens on axis 'cp' of 1"
    ):
        ring_attention(x, x, x, plan, single.axis("cp"))
