"""Maxima and minima over ranks: those of torch, and NaN where any rank has NaN."""

import math

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import ParallelLayout, all_reduce
from megatron_parallel.collectives.extremes import from_ordered, to_ordered
from megatron_parallel.testing import Rank, WorkerPool

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
VALUES = (-math.inf, -3.5, -1e-7, -0.0, 0.0, 1e-7, 2.25, 65504.0, math.inf)
LIMITS = (torch.finfo(torch.float32).tiny, -torch.finfo(torch.float32).max)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_integers_have_the_order_of_the_numbers(op: str, dtype: torch.dtype) -> None:
    values = torch.tensor([*VALUES, *LIMITS, math.nan, -math.nan], dtype=dtype)
    ordered = to_ordered(values, op)
    back = from_ordered(ordered, op, dtype)
    torch.testing.assert_close(back, values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(back[:-2]), torch.signbit(values[:-2]))  # of -0.0 too
    numbers = ordered[:-2]
    assert torch.equal(values[:-2][numbers.argsort()], values[:-2].sort().values)
    outermost = ordered.max() if op == "max" else ordered.min()
    assert (ordered[-2:] == outermost).all() and (numbers != outermost).all()


def reduced(rank: Rank, values: list[list[float]], op: str, dtype: torch.dtype) -> torch.Tensor:
    axis = rank.mesh(ParallelLayout()).axis("dp")
    return all_reduce(torch.tensor(values[rank.rank], dtype=dtype), axis, op)


def plainly(rank: Rank, values: list[list[float]]) -> torch.Tensor:
    t = torch.tensor(values[rank.rank])
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("holder", range(3))
def test_a_nan_of_any_rank_survives(worker_pool: WorkerPool, holder: int, op: str) -> None:
    values = [[1.0, 5.0, -math.inf], [2.0, -4.0, 7.0], [3.0, 0.0, math.inf]]
    expected = torch.tensor(values).unbind(0)
    both = torch.maximum if op == "max" else torch.minimum
    expected = both(both(expected[0], expected[1]), expected[2])
    values[holder][1] = math.nan
    expected[1] = math.nan
    for dtype in DTYPES:
        for found in worker_pool.run(reduced, values, op, dtype, ranks=3):
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_gloo_loses_a_nan_of_another_rank(worker_pool: WorkerPool) -> None:
    """Shows that the test above can fail."""
    lost = []
    for holder in range(3):
        values = [[math.nan if rank == holder else 1.0] for rank in range(3)]
        lost.append(not worker_pool.run(plainly, values, ranks=3)[0].isnan().item())
    assert any(lost)
