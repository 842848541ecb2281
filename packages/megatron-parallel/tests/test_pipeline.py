"""The pipeline engine on Gloo ranks equals plain autograd of the whole model, in float64."""

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_parallel import (
    LayoutError,
    Mesh,
    ParallelLayout,
    all_reduce,
)
from megatron_parallel.pipeline import (
    Action,
    BackwardPass,
    PipelineEngine,
    TensorSpec,
    check_micro_batches,
    planned_actions,
    split_layers,
    stage_parameters,
    sum_tied_gradient,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

VOCAB, HIDDEN, LENGTH = 11, 6, 5
Batch = dict[str, Tensor]


class Chunk(nn.Module):
    """Some layers of a small stack; the first chunk has the embedding, the last the output."""

    def __init__(self, layers: range, first: bool, last: bool, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(HIDDEN, HIDDEN) for i in layers})
        if first or (last and tied):
            self.embedding = nn.Embedding(VOCAB, HIDDEN)
        if last and not tied:
            self.output = nn.Linear(HIDDEN, VOCAB)
        self.first, self.last, self.tied = first, last, tied
        self.double()
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(
        self, x: Tensor | None = None, *, tokens: Tensor | None = None, gain: float = 1.0
    ) -> Tensor:
        if self.first:
            x = self.embedding(tokens)
        assert x is not None
        for layer in self.layers.values():
            x = x + gain * torch.tanh(layer(x))
        if not self.last:
            return x.transpose(0, 1).contiguous().transpose(0, 1)  # strides that cannot be sent
        return x @ self.embedding.weight.t() if self.tied else self.output(x)


def inputs(batch: Batch, stage: int) -> dict[str, Any]:
    return {"tokens": batch["tokens"], "gain": 0.7} if stage == 0 else {"gain": 0.7}


def stage_output_spec(batch: Batch, stage: int) -> TensorSpec:
    return TensorSpec((*batch["tokens"].shape, HIDDEN), torch.float64)


def loss(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    each = nn.functional.cross_entropy(
        output.flatten(0, 1), batch["labels"].flatten(), reduction="none"
    )
    mask = batch["mask"].flatten()
    return {"loss": (each * mask).sum(), "tokens": mask.sum(), "square": (output**2).sum()}


def make_batches(count: int, seed: int = 0, length: int = LENGTH) -> list[Batch]:
    """Returns micro-batches with different numbers of true tokens."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for i in range(count):
        tokens = torch.randint(VOCAB, (length, 2), generator=generator)
        labels = torch.randint(VOCAB, (length, 2), generator=generator)
        mask = torch.ones(length, 2, dtype=torch.float64)
        mask[: (i + seed) % length] = 0
        batches.append({"tokens": tokens, "labels": labels, "mask": mask})
    return batches


def denominators(batches: list[Batch]) -> dict[str, float]:
    return {"loss": float(sum(b["mask"].sum() for b in batches)), "square": 1000.0}


def reference(
    batches: list[Batch], layers: int, tied: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns sums and gradients by plain autograd on one process."""
    model = Chunk(range(layers), True, True, tied)
    total = {"loss": 0.0, "tokens": 0.0, "square": 0.0}
    for batch in batches:
        sums = loss(model(**inputs(batch, 0)), batch)
        total = {name: total[name] + sums[name] for name in total}
    divided = [total[name] / below for name, below in denominators(batches).items()]
    sum(divided).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: t.detach() for name, t in total.items()}, gradients  # type: ignore[union-attr, return-value]


def build(mesh: Mesh, split: tuple[range, ...], tied: bool, **options: Any) -> PipelineEngine:
    stages = mesh.layout.stages(mesh.axis("pp").index)
    chunks = [Chunk(split[i], i == 0, i == len(split) - 1, tied) for i in stages]
    if tied and stages[0] == 0 and stages[-1] == len(split) - 1 > 0:
        chunks[-1].embedding = chunks[0].embedding
    return PipelineEngine(
        mesh,
        chunks,
        loss,
        inputs=inputs,
        stage_output_spec=stage_output_spec,
        sums=("loss", "tokens", "square"),
        **options,
    )


def train(
    mesh: Mesh,
    split: tuple[range, ...],
    counts: list[int],
    tied: bool,
    schedule: str,
    group_size: int | None = None,
) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[Action]]]:
    """Returns sums, gradients and trace of a step for each number of micro-batches."""
    engine = build(mesh, split, tied, schedule=schedule, group_size=group_size)
    parameters = stage_parameters(engine.chunks)
    results = []
    dp = mesh.axis("dp")
    for count in counts:
        batches = make_batches(count * dp.size)
        own = batches[dp.index :: dp.size]
        for parameter in parameters.values():
            parameter.grad = None
        sums = engine.run(own, denominators(batches))
        for total in sums.values():
            all_reduce(total, dp)
        if tied and "embedding.weight" in parameters:
            sum_tied_gradient(parameters["embedding.weight"], mesh)
        for parameter in parameters.values():
            all_reduce(parameter.grad, dp)
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        results.append((sums, gradients, list(engine.trace)))
    return results


def largest_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(
        ((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-3)).item()
        for n in found
    )


def assert_equal(
    ranks: list[Any], counts: list[int], layout: ParallelLayout, layers: int, tied: bool
) -> None:
    for step, count in enumerate(counts):
        wanted_sums, wanted = reference(make_batches(count * (layout.dp or 1)), layers, tied)
        names: set[str] = set()
        for steps in ranks:
            sums, gradients, _ = steps[step]
            assert largest_difference(sums, wanted_sums) < 1e-12
            assert largest_difference(gradients, wanted) < 1e-12
            names |= set(gradients)
        assert names == set(wanted)  # every gradient was compared


V2 = ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")
EMPTY_STAGES = (range(0), range(3), range(3, 3), range(3, 4))
CASES = [
    ("pp2", ParallelLayout(pp=2, dp=1), split_layers(4, 2), "1f1b"),
    ("pp2-gpipe", ParallelLayout(pp=2, dp=1), split_layers(4, 2), "gpipe"),
    ("pp2-uneven", ParallelLayout(pp=2, dp=1), split_layers(5, 2, first=2), "1f1b"),
    (
        "pp4",
        ParallelLayout(pp=4, dp=1),
        split_layers(6, 4, count_embedding=True, count_loss=True),
        "1f1b",
    ),
    ("pp2-dp2", ParallelLayout(pp=2, dp=2), split_layers(4, 2), "1f1b"),
    ("pp2-vpp2", ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "interleaved-1f1b"),
    ("pp2-bfs", ParallelLayout(pp=2, dp=1), split_layers(4, 2), "looped-bfs"),
    ("pp2-vpp2-bfs", ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "looped-bfs"),
    ("pp4-combined", ParallelLayout(pp=4, dp=1), split_layers(4, 4), "combined-1f1b"),
    ("pp2-vpp2-combined", ParallelLayout(pp=2, vpp=2, dp=1), EMPTY_STAGES, "combined-1f1b"),
    ("pp2-zb", ParallelLayout(pp=2, dp=1), split_layers(4, 2), "zero-bubble"),
    ("pp2-vpp2-zb", ParallelLayout(pp=2, vpp=2, dp=1), EMPTY_STAGES, "zero-bubble"),
    ("pp2-zbv", V2, EMPTY_STAGES, "zb-v"),
    ("pp2-dualpipe", V2, split_layers(4, 2, 2), "dualpipe-v"),
    ("pp4-zbv", replace(V2, pp=4), split_layers(8, 4, 2), "zb-v"),
    ("pp4-dualpipe", replace(V2, pp=4), split_layers(8, 4, 2), "dualpipe-v"),
]


def runs(schedule: str, layout: ParallelLayout, count: int) -> bool:
    try:
        check_micro_batches(schedule, layout.pp, layout.vpp, count)
    except LayoutError:
        return False
    return True


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "split", "schedule"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_sums_and_gradients_equal_those_of_one_process(
    worker_pool: WorkerPool,
    layout: ParallelLayout,
    split: tuple[range, ...],
    schedule: str,
    tied: bool,
) -> None:
    counts = [c for c in range(1, 9) if runs(schedule, layout, c)]
    ranks = worker_pool.run_mesh(layout, train, split, counts, tied, schedule)
    assert_equal(ranks, counts, layout, split[-1].stop, tied)
    for rank, steps in enumerate(ranks):
        index = layout.coordinates(rank).pp
        for count, (_, _, trace) in zip(counts, steps, strict=True):
            assert trace == planned_actions(schedule, layout.pp, index, count, layout.vpp)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "combined-1f1b"])
def test_groups_of_any_size_give_the_results_of_one_process(
    worker_pool: WorkerPool, schedule: str
) -> None:
    layout, split, counts = ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), [3, 5, 6, 8]
    ranks = worker_pool.run_mesh(layout, train, split, counts, True, schedule, 3)
    assert_equal(ranks, counts, layout, 4, True)
    for rank, steps in enumerate(ranks):
        for count, (_, _, trace) in zip(counts, steps, strict=True):
            assert trace == planned_actions(schedule, 2, rank, count, 2, 3)
            if count == 6:
                assert trace != planned_actions(schedule, 2, rank, count, 2)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("schedule", "counts"), [("1f1b", [1, 3]), ("combined-1f1b", [2, 3])])
def test_one_stage_is_a_plain_loop_with_the_same_results(
    single: Mesh, schedule: str, counts: list[int], tied: bool
) -> None:
    assert not torch.distributed.is_initialized()
    steps = train(single, (range(3),), counts, tied, schedule)
    assert_equal([steps], counts, single.layout, 3, tied)
    assert steps[1][2] == planned_actions(schedule, 1, 0, 3)


def test_one_stage_announces_each_backward_pass_and_the_last_as_such(single: Mesh) -> None:
    passes: list[BackwardPass] = []

    def around(backward: BackwardPass) -> contextlib.AbstractContextManager[None]:
        passes.append(backward)
        return contextlib.nullcontext()

    batches = make_batches(3)
    engine = build(single, (range(3),), False, schedule="1f1b", around_backward=around)
    engine.run(batches, denominators(batches))
    assert passes == [BackwardPass(0, number, number == 2) for number in range(3)]


def test_evaluation_is_forward_only_and_leaves_no_trace_in_training(
    worker_pool: WorkerPool,
) -> None:
    def alternate(mesh: Mesh, split: tuple[range, ...], schedule: str) -> Any:
        engine = build(mesh, split, False, schedule=schedule)
        batches = make_batches(4)
        before = engine.evaluate(make_batches(3, seed=5))
        no_gradients = all(p.grad is None for c in engine.chunks for p in c.parameters())
        kinds = {action.kind for action in engine.trace}
        engine.run(batches, denominators(batches))
        after = engine.evaluate(make_batches(3, seed=5))
        gradients = {n: p.grad for n, p in stage_parameters(engine.chunks).items()}
        return before, after, gradients, no_gradients, kinds

    wanted, _ = reference(make_batches(3, seed=5), 4, False)
    _, wanted_gradients = reference(make_batches(4), 4, False)
    for layout, split, schedule in [
        (ParallelLayout(pp=2, dp=1), split_layers(4, 2), "1f1b"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "interleaved-1f1b"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "combined-1f1b"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "zero-bubble"),
        (V2, split_layers(4, 2, 2), "zb-v"),
        (V2, split_layers(4, 2, 2), "dualpipe-v"),
    ]:
        for before, after, gradients, untouched, kinds in worker_pool.run_mesh(
            layout, alternate, split, schedule
        ):
            assert largest_difference(before, wanted) < 1e-12
            assert largest_difference(after, wanted) < 1e-12
            assert largest_difference(gradients, wanted_gradients) < 1e-12
            assert untouched and kinds == {"F"}


def test_a_new_shape_builds_new_stages_and_old_ones_are_kept(worker_pool: WorkerPool) -> None:
    def lengths(mesh: Mesh) -> list[tuple[dict[str, Tensor], int]]:
        engine = build(mesh, split_layers(2, 2), False)
        runner: Any = engine._runner
        results = []
        for length in [5, 7, 5, *range(8, 16), 5]:
            batches = make_batches(2, length=length)
            results.append((engine.run(batches, denominators(batches)), len(runner._prepared)))
        return results

    for results in worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), lengths):
        assert [kept for _, kept in results] == [1, 2, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8]
        for (sums, _), length in zip(results, [5, 7, 5, *range(8, 16), 5], strict=True):
            assert (
                largest_difference(sums, reference(make_batches(2, length=length), 2, False)[0])
                < 1e-12
            )


def test_the_last_backward_pass_of_each_stage_is_announced(worker_pool: WorkerPool) -> None:
    def announced(mesh: Mesh, split: tuple[range, ...], schedule: str) -> Any:
        seen: list[tuple[BackwardPass, bool]] = []
        tracked: dict[int, nn.Parameter] = {}

        @contextlib.contextmanager
        def around(backward: BackwardPass) -> Iterator[None]:
            def gradient() -> Tensor:
                grad = tracked[backward.stage].grad
                return torch.zeros(()) if grad is None else grad.clone()

            before = gradient()
            yield
            seen.append((backward, bool((gradient() != before).any())))

        engine = build(mesh, split, False, schedule=schedule, around_backward=around)
        for stage, chunk in zip(engine.stages, engine.chunks, strict=True):
            tracked[stage] = next(chunk.parameters())
        batches = make_batches(4)
        engine.run(batches, denominators(batches))
        return engine.stages, seen, engine.trace

    for layout, split, schedule in [
        (ParallelLayout(pp=2, dp=1), split_layers(4, 2), "1f1b"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "interleaved-1f1b"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "looped-bfs"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "combined-1f1b"),
        (ParallelLayout(pp=2, vpp=2, dp=1), split_layers(4, 2, 2), "zero-bubble"),
        (V2, split_layers(4, 2, 2), "zb-v"),
        (V2, split_layers(4, 2, 2), "dualpipe-v"),
    ]:
        for stages, seen, trace in worker_pool.run_mesh(layout, announced, split, schedule):
            for stage in stages:
                passes = [b for b, _ in seen if b.stage == stage]
                ran = [a for a in trace if a.stage == stage and a.kind in "BW"]
                assert [b.micro_batch for b in passes] == [a.micro_batch for a in ran]
                assert [b.split for b in passes] == [a.kind == "W" for a in ran]
                assert [b.last for b in passes] == [False, False, False, True]
            assert all(changed for _, changed in seen)  # gradients grow inside the context only


def test_actions_are_printed_as_in_papers() -> None:
    assert str(Action("B", 1, 12)) == "B12"
