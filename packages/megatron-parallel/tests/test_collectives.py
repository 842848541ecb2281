"""Collectives over an axis, and region mappings with their gradients, on real ranks."""

import megatron_parallel.collectives
import pytest
import torch
from megatron_parallel import (
    Axis,
    LayoutError,
    Mesh,
    ParallelLayout,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)
from megatron_parallel.collectives import (
    ReduceOp,
    copy_to_axis,
    gather_from_axis,
    gather_sequence,
    receive,
    reduce_from_axis,
    scatter_sequence,
    scatter_to_axis,
    send,
)
from megatron_parallel.testing import WorkerPool

TP = {2: ParallelLayout(tp=2), 4: ParallelLayout(tp=4)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def own(
    rank: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (4, 8)
) -> torch.Tensor:
    """Returns small whole numbers, exact in every dtype and different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def test_an_axis_of_one_rank_returns_its_input(single: Mesh) -> None:
    x, axis = torch.randn(4, 4, requires_grad=True), single.axis("tp")
    plain = [all_reduce, all_gather, reduce_scatter, broadcast]
    mappings = [copy_to_axis, reduce_from_axis, gather_from_axis, scatter_to_axis]
    for function in (*plain, *mappings, gather_sequence, scatter_sequence):
        assert function(x, axis) is x


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_collectives(worker_pool: WorkerPool, ranks: int, dtype: torch.dtype) -> None:
    def run(mesh: Mesh) -> dict[str, torch.Tensor]:
        x, axis = own(mesh.rank, dtype), mesh.axis("tp")
        operations: tuple[ReduceOp, ...] = ("sum", "max", "min")
        results: dict[str, torch.Tensor] = {
            op: all_reduce(x.clone(), axis, op) for op in operations
        }
        for dim in (0, 1, -1):
            results[f"gather {dim}"] = all_gather(x, axis, dim)
            results[f"scatter {dim}"] = reduce_scatter(x, axis, dim)
        results["broadcast"] = broadcast(x.clone(), axis, source=1)
        strided = x.T
        results["strided"] = all_reduce(strided.clone(), axis)
        return results

    every = [own(rank, dtype) for rank in range(ranks)]
    stacked = torch.stack(every)
    for rank, found in enumerate(worker_pool.run_mesh(TP[ranks], run, ranks=ranks)):
        assert torch.equal(found["sum"], stacked.sum(0).to(dtype))
        assert torch.equal(found["max"], stacked.amax(0))
        assert torch.equal(found["min"], stacked.amin(0))
        for dim in (0, 1, -1):
            assert torch.equal(found[f"gather {dim}"], torch.cat(every, dim))
            expected = stacked.sum(0).to(dtype).chunk(ranks, dim)[rank]
            assert torch.equal(found[f"scatter {dim}"], expected)
        assert torch.equal(found["broadcast"], every[1])
        assert torch.equal(found["strided"], stacked.sum(0).to(dtype).T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_sent_from_one_rank_to_another(
    worker_pool: WorkerPool, dtype: torch.dtype
) -> None:
    """Sends around a ring, with peers by index on the axis and strided tensors at both ends."""

    def run(mesh: Mesh) -> tuple[torch.Tensor, bool]:
        axis, t = mesh.axis("pp"), torch.zeros(8, 4, dtype=dtype).T
        after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
        mine = own(mesh.rank, dtype, (8, 4)).T
        for step in range(2):
            if step == axis.index % 2:
                send(mine, axis, after)
            else:
                same = receive(t, axis, before) is t
        return t, same

    results = worker_pool.run_mesh(ParallelLayout(tp=2, pp=2, dp=1), run)
    for rank, (found, same) in enumerate(results):
        assert torch.equal(found, own((rank + 2) % 4, dtype, (8, 4)).T) and same


def test_sending_to_an_index_outside_the_axis_is_refused(single: Mesh) -> None:
    x, axis = torch.zeros(1), Mesh(ParallelLayout(pp=4, dp=1), 2).axis("pp")
    for index in (2, 4, -1):
        match = f"sent to index {index} of axis 'pp', which has 4 ranks"
        with pytest.raises(LayoutError, match=match):
            send(x, axis, index)
    with pytest.raises(LayoutError, match="received from index 0 of axis 'tp', which has 1 ranks"):
        receive(x, single.axis("tp"), 0)


def test_in_place_collectives_return_their_argument(worker_pool: WorkerPool) -> None:
    def run(mesh: Mesh) -> bool:
        x, axis = own(mesh.rank), mesh.axis("tp")
        return all_reduce(x, axis) is x and broadcast(x, axis) is x

    assert worker_pool.run_mesh(TP[2], run, ranks=2) == [True, True]


def test_a_dim_that_does_not_divide_is_refused(worker_pool: WorkerPool) -> None:
    def run(mesh: Mesh) -> str:
        with pytest.raises(LayoutError) as caught:
            scatter_to_axis(torch.zeros(3, 5), mesh.axis("tp"))
        return str(caught.value)

    assert (
        "dim -1 of shape (3, 5) cannot be cut into 2"
        in worker_pool.run_mesh(TP[2], run, ranks=2)[0]
    )


def mapped(mesh: Mesh, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns result and gradient of a mapping, with a different upstream gradient per rank."""
    mapping = getattr(megatron_parallel.collectives, name)
    axis: Axis = mesh.axis("tp")
    x = own(mesh.rank).requires_grad_()
    y = mapping(x, axis)
    upstream = own(100 + mesh.rank, shape=tuple(y.shape))
    if name == "gather_from_axis":  # its gradient must be the same on all ranks
        upstream = own(100, shape=tuple(y.shape))
    (grad,) = torch.autograd.grad(y, x, upstream.expand_as(y))
    return y.detach(), grad


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "copy_to_axis",
        "reduce_from_axis",
        "gather_from_axis",
        "scatter_to_axis",
        "gather_sequence",
        "scatter_sequence",
    ],
)
def test_region_mappings(worker_pool: WorkerPool, ranks: int, name: str) -> None:
    x = [own(rank) for rank in range(ranks)]
    total = torch.stack(x).sum(0)
    forward = {
        "copy_to_axis": x,
        "reduce_from_axis": [total] * ranks,
        "gather_from_axis": [torch.cat(x, -1)] * ranks,
        "scatter_to_axis": [x[rank].chunk(ranks, -1)[rank] for rank in range(ranks)],
        "gather_sequence": [torch.cat(x, 0)] * ranks,
        "scatter_sequence": list(total.chunk(ranks, 0)),
    }[name]
    up = [own(100 + rank, shape=tuple(forward[rank].shape)) for rank in range(ranks)]
    if name == "gather_from_axis":
        up = [up[0]] * ranks
    upstream = torch.stack(up).sum(0)
    backward = {
        "copy_to_axis": [upstream] * ranks,
        "reduce_from_axis": up,
        "gather_from_axis": list(up[0].chunk(ranks, -1)),
        "scatter_to_axis": [torch.cat(up, -1)] * ranks,
        "gather_sequence": list(upstream.chunk(ranks, 0)),
        "scatter_sequence": [torch.cat(up, 0)] * ranks,
    }[name]
    results = worker_pool.run_mesh(TP[ranks], mapped, name, ranks=ranks)
    for rank, (value, grad) in enumerate(results):
        assert torch.equal(value, forward[rank])
        assert torch.equal(grad, backward[rank])


def test_mappings_do_not_modify_tensors_of_others(worker_pool: WorkerPool) -> None:
    """A gradient that two functions share must not be summed in place."""

    def run(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        axis = mesh.axis("tp")
        x = own(mesh.rank).requires_grad_()
        y = x * 1.0
        kept = reduce_from_axis(y, axis)
        upstream = own(7)
        before = upstream.clone()
        (copy_to_axis(x, axis) + kept).backward(upstream)
        return y.detach() - x.detach(), upstream - before, x.grad

    for change, upstream_change, grad in worker_pool.run_mesh(TP[2], run, ranks=2):
        assert not change.any() and not upstream_change.any()
        assert torch.equal(grad, 3 * own(7))
