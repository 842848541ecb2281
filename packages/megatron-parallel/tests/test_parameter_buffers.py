"""Shards of parameters: what each rank updates, and that no module reads a weight too early.

One process plays all ranks: its collectives complete only when they are waited for. A gather
in flight leaves NaN where values of another rank belong.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    LayoutError,
    Mesh,
    ParallelLayout,
    ParameterBuffers,
    Sharding,
    View,
    _compat,
)
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn

WIDTH, LAYERS = 40, 4
SHARDED = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=1)
OVERLAPPED = DataParallelConfig(
    use_distributed_optimizer=True, overlap_param_gather=True, ddp_bucket_size=1
)


class Layer(nn.Linear):
    """Records when it runs, forward and backward."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.name, self.events = name, events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(f"forward {self.name}")
        y = super().forward(x)
        y.register_hook(lambda _: self.events.append(f"backward {self.name}"))
        return y


class Work:
    """A collective that completes when it is waited for."""

    def __init__(self, name: str, events: list[str], complete: Any) -> None:
        self.name, self.events, self.complete, self.there = name, events, complete, False

    def is_completed(self) -> bool:
        return self.there

    def wait(self) -> None:
        self.events.append(f"has {self.name}")
        self.complete()
        self.there = True


@contextmanager
def slow_collectives(model: nn.Module, events: list[str]) -> Iterator[None]:
    """Replaces collectives as if the other rank had the same gradients and parameters."""

    def name_of(t: Tensor) -> str:
        start, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        for name, parameter in model.named_parameters():
            for held in (parameter, parameter.grad):
                if held is not None and start <= held.data_ptr() < start + size:
                    return name
        raise AssertionError("a bucket without a parameter")

    def reduce(part: Tensor, whole: Tensor, group: Any) -> Work:
        name = f"sum {name_of(whole)}"
        events.append(f"starts {name}")
        return Work(name, events, lambda: part.mul_(2))

    def gather(whole: Tensor, part: Tensor, group: Any) -> Work:
        name = f"weights {name_of(whole)}"
        events.append(f"starts {name}")
        updated = whole.clone()
        own = part.clone()
        whole.fill_(math.nan)
        part.copy_(own)
        return Work(name, events, lambda: whole.copy_(updated))

    with (
        patch.object(_compat, "start_reduce_scatter", reduce),
        patch.object(_compat, "start_all_gather", gather),
    ):
        yield


def played(config: DataParallelConfig) -> tuple[nn.Sequential, Any, Any, list[str]]:
    """Returns a model on rank 0 of 2, its buffers, and the events."""
    events: list[str] = []
    model = nn.Sequential(*(Layer(f"{i}.weight", events) for i in range(LAYERS)))
    mesh = Mesh(ParallelLayout(dp=2), 0, groups={(0, 1): object()})
    table = {name: Sharding((WIDTH, WIDTH)) for name, _ in model.named_parameters()}
    buffers = GradientBuffers(model.named_parameters(), table, mesh, config)
    return model, buffers, ParameterBuffers(model, buffers, table), events


def two_steps(model: nn.Module, buffers: Any, shards: Any) -> list[float]:
    losses = []
    x = torch.linspace(0, 1, WIDTH, dtype=torch.float64).expand(3, WIDTH)
    for _ in range(2):
        buffers.begin(last=True)
        loss = model(x).square().mean()
        loss.backward()
        buffers.finish()
        for name, gradient in buffers.gradients().items():
            shards.local_shards()[name].sub_(0.1 * gradient)
        buffers.zero()
        shards.start_gather()
        losses.append(loss.item())
    return losses


def test_sums_start_in_the_backward_pass_and_weights_arrive_just_before_they_are_read() -> None:
    model, buffers, shards, events = played(OVERLAPPED)
    with slow_collectives(model, events):
        losses = two_steps(model, buffers, shards)
    assert all(map(math.isfinite, losses))
    weights = [f"{i}.weight" for i in range(LAYERS)]
    first = events.index("starts weights 0.weight")
    backward = events[LAYERS:first]
    # each sum starts before the next layer's backward pass, and is waited for after the last one
    for before, after in zip(reversed(weights[1:]), reversed(weights[:-1]), strict=True):
        assert backward.index(f"starts sum {before}") < backward.index(f"backward {after}")
        assert backward.index(f"has sum {before}") > backward.index("backward 0.weight")
    # all gathers start together, in forward order; each is waited for by its layer and no earlier
    again = events[first : first + 3 * LAYERS]
    assert again[:LAYERS] == [f"starts weights {name}" for name in weights]
    assert again[LAYERS:] == [
        event for name in weights for event in (f"has weights {name}", f"forward {name}")
    ]
    gathers = shards.gathers()
    assert [gather.parameters for gather in gathers] == []  # no wait in the second step yet
    with slow_collectives(model, events):
        shards.wait_for_parameters()
    assert [gather.parameters for gather in shards.gathers()] == [(name,) for name in weights]


def test_weights_keep_their_values_when_they_move_into_buffers() -> None:
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    before = model.weight.detach().clone()
    mesh = Mesh(ParallelLayout(dp=2), 0, groups={(0, 1): object()})
    table = {"weight": Sharding((WIDTH, WIDTH))}
    buffers = GradientBuffers(model.named_parameters(), table, mesh, SHARDED)
    (part,) = ParameterBuffers(model, buffers, table).local_shards().values()
    assert torch.equal(model.weight, before)
    assert torch.equal(part, before.flatten()[: len(part)]) and 0 < len(part) < before.numel()


def test_without_overlap_weights_are_gathered_when_start_gather_returns() -> None:
    model, buffers, shards, events = played(SHARDED)
    with slow_collectives(model, events):
        losses = two_steps(model, buffers, shards)
    assert all(map(math.isfinite, losses))
    first = events.index("starts weights 0.weight")
    assert events[first : first + 2 * LAYERS] == [
        *(f"starts weights {i}.weight" for i in range(LAYERS)),
        *(f"has weights {i}.weight" for i in reversed(range(LAYERS))),
    ]


def test_a_weight_read_before_its_gather_shows() -> None:
    model, buffers, shards, events = played(OVERLAPPED)
    for hook in shards._hooks[1:2]:
        hook.remove()
    with slow_collectives(model, events):
        assert math.isnan(two_steps(model, buffers, shards)[1])


def test_a_stage_waits_for_tied_weights_before_anything_runs() -> None:
    class Stage(nn.Module):
        def __init__(self, events: list[str]) -> None:
            super().__init__()
            self.block, self.embedding = Layer("block", events), Layer("embedding", events)
            self.events = events

        def forward(self, x: Tensor) -> Tensor:
            self.events.append("forward stage")
            return self.block(x) @ self.embedding.weight  # without calling its owner

    events: list[str] = []
    model = Stage(events)
    mesh = Mesh(ParallelLayout(dp=2, pp=2), 0, groups={(0, 1): object()})
    tied = {
        n: Sharding((WIDTH, WIDTH), tied="embedding" if "emb" in n else None)
        for n, _ in model.named_parameters()
    }
    buffers = GradientBuffers(model.named_parameters(), tied, mesh, OVERLAPPED)
    shards = ParameterBuffers(model, buffers, tied)
    with slow_collectives(model, events):
        shards.start_gather()
        assert model(torch.ones(1, WIDTH, dtype=torch.float64)).isfinite().all()
    assert events[2:6] == [
        "has weights embedding.weight",
        "forward stage",
        "has weights block.weight",
        "forward block",
    ]


def test_shards_of_all_ranks_cover_every_parameter_once() -> None:
    shapes = {"a": (7, 5), "b": (300,), "c": (3, 4, 11), "d": (1,), "e": ()}
    layout = ParallelLayout(dp=4)
    seen = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(4):
        mesh = Mesh(layout, rank)
        stage = nn.ParameterDict({n: nn.Parameter(torch.ones(s)) for n, s in shapes.items()})
        table = {name: Sharding(shape) for name, shape in shapes.items()}
        config = DataParallelConfig(use_distributed_optimizer=True)
        buffers = GradientBuffers(stage.named_parameters(), table, mesh, config)
        shards = ParameterBuffers(stage, buffers, table)
        parts = shards.local_shards()
        for name, views in shards.views(parts, mesh).items():
            assert len(views) <= max(1, 2 * len(shapes[name]) - 1)
            for view in views:
                assert isinstance(view, View) and view.replica == 0
                ends = zip(view.offsets, view.lengths, strict=True)
                seen[name][tuple(slice(o, o + n) for o, n in ends)] += 1
        for part in parts.values():
            part.fill_(2)
        assert sum((p == 2).sum() for p in stage.parameters()) == sum(
            map(Tensor.numel, parts.values())
        )
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize("size", [1, 150, 10**6])
def test_shards_of_gradients_are_those_of_the_whole_sums(
    worker_pool: WorkerPool, size: int
) -> None:
    def both(mesh: Mesh) -> float:
        worst = 0.0
        found = []
        for sharded in (False, True):
            model = nn.Sequential(*(nn.Linear(11, 11).double() for _ in range(3)))
            for number, parameter in enumerate(model.parameters()):
                parameter.data.fill_(0.1 * number)
            table = {name: Sharding(tuple(p.shape)) for name, p in model.named_parameters()}
            config = DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=size)
            buffers = GradientBuffers(model.named_parameters(), table, mesh, config)
            for number in range(2):
                buffers.begin(last=number == 1)
                x = torch.full((1, 11), 1.0 + mesh.rank + number, dtype=torch.float64)
                model(x).square().sum().backward()
            buffers.finish()
            found.append((model, buffers, table))
        whole = found[0][1].gradients()
        parts = ParameterBuffers(*found[1]).local_shards()
        shards = found[1][1].gradients()
        assert parts.keys() == shards.keys()
        for name, gradient in shards.items():
            (start,) = (
                part.start
                for bucket in found[1][1].buckets
                for part in bucket.plan.shard_ranges(mesh.rank)
                if part.name == name
            )
            wanted = whole[name].flatten()[start : start + gradient.numel()]
            worst = max(worst, (gradient - wanted).abs().max().item() / wanted.abs().max().item())
        return worst

    assert max(worker_pool.run_mesh(ParallelLayout(dp=3), both)) < 1e-14


def test_what_does_not_go_together_is_refused(single: Mesh) -> None:
    model = nn.Linear(2, 2, bias=False)
    table = {"weight": Sharding((2, 2))}
    buffers = GradientBuffers(model.named_parameters(), table, single)
    with pytest.raises(LayoutError, match="set use_distributed_optimizer"):
        ParameterBuffers(model, buffers, table)
    with pytest.raises(LayoutError, match="overlap_param_gather needs use_distributed_optimizer"):
        DataParallelConfig(overlap_param_gather=True)
    with pytest.raises(LayoutError, match="overlap_param_gather needs overlap_grad_reduce"):
        DataParallelConfig(
            use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=False
        )
    with pytest.raises(LayoutError, match="ddp_bucket_size 0 is below 1"):
        DataParallelConfig(ddp_bucket_size=0)
