"""Broadcast of tensors of all kinds over an axis, and all-gather of texts."""

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.collectives import all_gather_texts, broadcast_tensors
from megatron_parallel.testing import WorkerPool
from torch import Tensor


def tensors() -> dict[str, Tensor]:
    """Returns tensors with unaligned lengths, and with zero and one element."""
    made = {
        str(dtype): torch.arange(15).view(3, 5).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool)
    }
    extra = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4, dtype=torch.int16)}
    return made | {"a name, in words": torch.arange(6).view(2, 3).t()} | extra


@pytest.mark.parametrize("source", [0, 2])
def test_all_ranks_receive_bitwise_equal_tensors(worker_pool: WorkerPool, source: int) -> None:
    def run(mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, int]]:
        axis = mesh.axis("tp")
        own = tensors() if axis.index == source else {"other": torch.zeros(mesh.rank + 1)}
        with mesh.counting() as traffic:
            found = broadcast_tensors(own, axis, source, purpose="samples")
        return found, {record.operation: record.calls for record in traffic.records}

    for found, calls in worker_pool.run_mesh(ParallelLayout(tp=3, dp=1), run):
        assert list(found) == list(tensors())
        for name, expected in tensors().items():
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected)
        assert calls == {"broadcast of sizes of samples": 1, "broadcast of samples": 1}


def test_an_empty_mapping_can_be_broadcast(worker_pool: WorkerPool) -> None:
    def run(mesh: Mesh) -> dict[str, Tensor]:
        return broadcast_tensors({} if mesh.rank == 0 else tensors(), mesh.axis("tp"))

    assert worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), run) == [{}, {}]


def test_on_one_rank_nothing_is_sent_or_copied(single: Mesh) -> None:
    given = tensors()
    with single.counting() as traffic:
        found = broadcast_tensors(given, single.axis("tp"))
    assert all(found[name] is tensor for name, tensor in given.items())
    assert traffic.records == []


def test_every_rank_gets_the_texts_of_all(worker_pool: WorkerPool) -> None:
    texts = ["", "größer", "a" * 1000]

    def run(mesh: Mesh) -> list[str]:
        return all_gather_texts(texts[mesh.rank], mesh.axis("tp"))

    assert worker_pool.run_mesh(ParallelLayout(tp=3, dp=1), run) == [texts] * 3
    assert all_gather_texts("alone", Mesh.single().axis("tp")) == ["alone"]
