"""The worker pool on CUDA devices over NCCL."""

import pytest
import torch
import torch.distributed as dist
from megatron_parallel.testing import Rank, WorkerPool

pytestmark = pytest.mark.gpu


def sum_on_device(rank: Rank) -> tuple[torch.Tensor, str]:
    total = torch.full((3,), rank.rank + 1.0, device=rank.device)
    dist.all_reduce(total)
    return total, str(rank.device)


def test_ranks_sum_over_nccl(device_pool: WorkerPool) -> None:
    ranks = device_pool.max_ranks
    for number, (total, device) in enumerate(device_pool.run(sum_on_device, ranks=ranks)):
        assert device == f"cuda:{number}"
        assert total.tolist() == [ranks * (ranks + 1) / 2] * 3


def test_a_pool_of_one_device() -> None:
    with WorkerPool(1, device="cuda") as pool:
        total, device = pool.run(sum_on_device, ranks=1, timeout=120)[0]
    assert device == "cuda:0" and total.tolist() == [1.0] * 3
