"""Gradient buffers: mixed precision, views, the order of sums, and calls that are refused."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
    TrainableParameters,
)
from megatron_parallel.data_parallel import ParameterShards
from megatron_parallel.data_parallel.fully_sharded import FullySharded
from megatron_parallel.testing import WorkerError, WorkerPool
from torch import Tensor, nn

from .test_data_parallel import Model, difference, global_batch, plain_gradients, table, train_step


def test_mixed_precision_equals_fp32_sums_of_its_own_gradients(worker_pool: WorkerPool) -> None:
    """Compares with a loop that saves each micro-batch's bf16 gradient and sums them in fp32."""

    def by_hand(mesh: Mesh) -> dict[str, Tensor]:
        model = Model(torch.bfloat16)
        tokens, mask = global_batch()
        total: dict[str, Tensor] = {}
        for some, kept in zip(tokens.chunk(4), mask.chunk(4), strict=True):
            model.zero_grad()
            ((model(some) * kept).sum() / mask.sum()).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    total[name] = total[name] + gradient if name in total else gradient
        return total

    truth = worker_pool.run_mesh(ParallelLayout(dp=1), by_hand)[0]
    for gradients in worker_pool.run_mesh(ParallelLayout(dp=2), train_step, 150, 2, torch.bfloat16):
        ordered = {name: truth[name] for name in gradients}
        assert difference(gradients, ordered) < 1e-6


# -- one rank ----------------------------------------------------------------------------------


def test_on_one_rank_gradients_stay_where_autograd_puts_them(single: Mesh) -> None:
    model = Model(torch.float64)
    buffers = GradientBuffers(model.named_parameters(), table(model), single)
    assert all(bucket.flat is None for bucket in buffers.buckets)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    tokens, _ = global_batch()
    buffers.begin(last=True)
    model(tokens[:1]).sum().backward()
    buffers.finish()
    gradients = buffers.gradients()
    assert gradients["up.weight"] is model.up.weight.grad
    assert model.seldom.grad is None and not gradients["seldom"].any()
    assert "frozen" not in gradients
    assert buffers.reductions() == []
    buffers.zero()
    assert model.up.weight.grad is None


def test_the_shard_of_one_rank_is_what_autograd_has_made(single: Mesh) -> None:
    model = Model(torch.float64)
    config = DataParallelConfig(use_distributed_optimizer=True)
    buffers = GradientBuffers(model.named_parameters(), table(model), single, config)
    shards = ParameterBuffers(model, buffers, table(model))
    tokens, _ = global_batch()
    buffers.begin(last=True)
    model(tokens[:1]).sum().backward()
    buffers.finish()
    gradients = buffers.gradients()
    assert {name: part.shape for name, part in shards.local_shards().items()} == {
        name: gradient.shape for name, gradient in gradients.items()
    }
    assert gradients["up.weight"].data_ptr() == model.up.weight.grad.data_ptr()
    assert torch.equal(gradients["up.weight"], model.up.weight.grad.flatten())
    assert not gradients["seldom"].any()


def test_one_rank_equals_plain_torch(single: Mesh) -> None:
    assert difference(train_step(single, 150, 1), plain_gradients()) == 0.0
    assert difference(train_step(single, 150, 4), plain_gradients()) < 1e-13


# -- views, order and overlap ------------------------------------------------------------------


def test_gradients_are_views_of_the_buckets_and_of_grad(worker_pool: WorkerPool) -> None:
    def shared(mesh: Mesh) -> list[bool]:
        model = Model(torch.float32)
        buffers = GradientBuffers(
            model.named_parameters(),
            table(model),
            mesh,
            config=DataParallelConfig(ddp_bucket_size=150),
        )
        tokens, _ = global_batch()
        found = []
        for _ in range(2):
            buffers.begin(last=True)
            model(tokens).sum().backward()
            buffers.finish()
            gradients = buffers.gradients()
            found += [p.grad is gradients[n] for n, p in model.named_parameters() if n in gradients]
            addresses = sorted(g.untyped_storage().data_ptr() for g in gradients.values())
            flats = {b.flat.untyped_storage().data_ptr() for b in buffers.buckets}
            found.append(set(addresses) == flats)
            buffers.zero()
        buffers.close()
        found.append(not any(p._post_accumulate_grad_hooks for p in model.parameters()))
        return found

    for found in worker_pool.run_mesh(ParallelLayout(dp=2), shared):
        assert all(found)


class _Watch(torch.autograd.Function):
    """Identity whose backward pass waits until a condition holds, at most a minute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, condition: Callable[[], bool], seen: list[float]) -> Tensor:
        ctx.condition, ctx.seen = condition, seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        deadline = time.monotonic() + 60
        while not ctx.condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        ctx.seen.append(time.perf_counter())
        return grad, None, None


def test_fully_sharded_gradients_are_summed_over_stages_in_the_order_of_names() -> None:
    table = {
        "b": Sharding((4, 2), tied="embedding"),
        "norm": Sharding((4,), partial="tp"),
        "a": Sharding((4,), partial="tp", tied="embedding"),
        "plain": Sharding((4, 2)),
    }
    calls: list[tuple[list[str], str]] = []
    sharded = object.__new__(FullySharded)  # without process groups
    sharded._table, sharded._parameters = table, dict.fromkeys(table)  # type: ignore[assignment]
    sharded._mesh = Mesh(ParallelLayout(tp=2, pp=2, dp=1), 0)
    sharded._finished = False
    sharded._unsharded = SimpleNamespace(finish=lambda: None)  # type: ignore[assignment]
    sharded._sum = lambda names, axis: calls.append((list(names), axis))  # type: ignore[method-assign, assignment]
    sharded.finish()
    assert calls == [(["norm", "a"], "tp"), (["a"], "embedding"), (["b"], "embedding")]


def test_gradients_of_experts_are_summed_over_ranks_with_the_same_experts() -> None:
    weights = {name: nn.Parameter(torch.ones(2, 4)) for name in ("dense", "experts")}
    shardings = {"dense": Sharding((2, 4)), "experts": Sharding((2, 4), experts=True)}
    mesh = Mesh(ParallelLayout(dp=4, ep=2), 0, groups={(0, 1, 2, 3): object(), (0, 2): object()})
    buffers = GradientBuffers(weights, shardings, mesh)
    ranks = {name: b.axes.inner.ranks for b in buffers.buckets for name in b.parameters}
    assert ranks == {"dense": (0, 1, 2, 3), "experts": (0, 2)}


def test_sums_complete_before_the_backward_pass_has_ended(worker_pool: WorkerPool) -> None:
    def overlapping(mesh: Mesh) -> tuple[list[bool], list[tuple[str, ...]]]:
        layers = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(3))).double()
        buffers = GradientBuffers(
            layers.named_parameters(),
            table(layers),
            mesh,
            config=DataParallelConfig(ddp_bucket_size=1),
        )
        seen: list[float] = []
        x = torch.ones(5, 40, dtype=torch.float64)
        for number in range(2):
            last = number == 1
            buffers.begin(last=last)
            hidden = layers[0](x)
            # The first layer's backward pass starts only after both other sums are complete.
            done = (lambda: all(b.done for b in buffers.buckets[:2])) if last else (lambda: True)
            hidden = _Watch.apply(hidden, done, seen)
            layers[2](layers[1](hidden)).square().sum().backward()
        buffers.finish()
        reductions = buffers.reductions()
        early = [reduction.launched < seen[1] for reduction in reductions]
        none_before_the_last = reductions[0].launched > seen[0]
        return [*early, none_before_the_last], [reduction.parameters for reduction in reductions]

    for early, order in worker_pool.run_mesh(ParallelLayout(dp=2), overlapping):
        assert early == [True, True, False, True]
        assert order == [("2.weight",), ("1.weight",), ("0.weight",)]


def test_ranks_that_use_different_parameters_start_sums_in_one_order(
    worker_pool: WorkerPool,
) -> None:
    def choosy(mesh: Mesh) -> tuple[list[tuple[str, ...]], list[float]]:
        weights = {n: nn.Parameter(torch.ones(1, dtype=torch.float64)) for n in "abc"}
        shardings = dict.fromkeys(weights, Sharding((1,)))
        buffers = GradientBuffers(weights, shardings, mesh, DataParallelConfig(ddp_bucket_size=1))
        buffers.begin(last=True)
        used = "ab" if mesh.rank == 0 else "ac"
        sum(weights[name] * (1 + mesh.rank) for name in used).backward()
        buffers.finish()
        gradients = [g.item() for g in buffers.gradients().values()]
        return [r.parameters for r in buffers.reductions()], gradients

    for order, gradients in worker_pool.run_mesh(ParallelLayout(dp=2), choosy):
        assert order == [("c",), ("b",), ("a",)]
        assert gradients == [3.0, 1.0, 2.0]


# -- mistakes ----------------------------------------------------------------------------------


def test_calls_in_the_wrong_order_are_refused(single: Mesh) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    buffers = GradientBuffers({"w": weight}, {"w": Sharding((2,))}, single)
    with pytest.raises(LayoutError, match=r"not summed yet: call finish\(\)"):
        buffers.gradients()
    buffers.begin(last=True)
    with pytest.raises(LayoutError, match=r"begin\(\) after begin\(last=True\)"):
        buffers.begin()
    weight.sum().backward()
    with pytest.raises(LayoutError, match=r"'w' came after the reduction of its bucket"):
        weight.sum().backward()
    with pytest.raises(LayoutError, match=r"zero\(\) while"):
        buffers.zero()
    buffers.finish()
    with pytest.raises(LayoutError, match=r"finish\(\) was called twice"):
        buffers.finish()
    with pytest.raises(LayoutError, match=r"begin\(\) after finish\(\): call zero\(\)"):
        buffers.begin()
    with pytest.raises(LayoutError, match=r"'w' came after the reduction of its bucket"):
        weight.sum().backward()
    buffers.zero()
    buffers.begin()


def test_parameters_are_named_once_and_in_the_table(single: Mesh) -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(LayoutError, match="'a' and 'b' are the same parameter"):
        GradientBuffers({"a": weight, "b": weight}, {}, single)
    with pytest.raises(LayoutError, match="'a' is not in the sharding table"):
        GradientBuffers({"a": weight}, {}, single)


def test_a_late_gradient_is_refused_before_it_spoils_a_sum(worker_pool: WorkerPool) -> None:
    def careless(mesh: Mesh) -> None:
        weight = nn.Parameter(torch.ones(2))
        buffers = GradientBuffers({"w": weight}, {"w": Sharding((2,))}, mesh)
        buffers.begin(last=True)
        weight.sum().backward()
        weight.sum().backward()

    with pytest.raises(WorkerError, match="pass last=True only to the last backward pass"):
        worker_pool.run_mesh(ParallelLayout(dp=2), careless)


def test_shards_without_gradients_of_shards_are_refused(single: Mesh) -> None:
    """A rank that updates shards cannot read the gradients that autograd leaves on parameters."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    table = {"weight": Sharding((2,))}
    shards = [ParameterShards.__new__(ParameterShards)]  # refused before it is read
    with pytest.raises(LayoutError, match="shards of parameters need shards of gradients: pass "):
        TrainableParameters({"weight": weight}, table, single, shards=shards)
    plain = TrainableParameters({"weight": weight}, table, single)
    assert plain.gradients()["weight"] is weight.grad
