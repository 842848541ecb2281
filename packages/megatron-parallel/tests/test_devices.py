"""The CUDA device of a rank, determined from indices only, and the backend of process groups."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.mesh.agreement import agree
from megatron_parallel.mesh.devices import backend_of, cuda_device, device_identity, local_device
from megatron_parallel.mesh.rendezvous import init_default_group
from megatron_parallel.mesh.store import default_store
from megatron_parallel.testing import Rank, WorkerPool


@pytest.mark.parametrize(
    ("device", "local_rank", "visible", "index"),
    [
        ("cuda", 0, 8, 0),
        ("cuda", 7, 8, 7),
        ("cuda", 0, 1, 0),
        ("cuda", 3, 1, 0),  # as with --gpus-per-task=1 of Slurm
        ("cuda:2", 0, 3, 2),
        ("cuda:0", 5, 1, 0),
    ],
)
def test_each_rank_uses_the_device_of_its_local_rank_or_the_only_visible_one(
    device: str, local_rank: int, visible: int, index: int
) -> None:
    assert cuda_device(torch.device(device), local_rank, visible) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("device", "local_rank", "visible", "line"),
    [
        (
            "cuda",
            3,
            2,
            "LOCAL_RANK is 3, but 2 CUDA devices are visible: start at most 2 ranks on this "
            "machine, or show each task one device of its own (Slurm: --gpus-per-task=1)",
        ),
        (
            "cuda:2",
            0,
            2,
            "device 'cuda:2' does not exist, 2 CUDA devices are visible: use an index below "
            "2, or 'cuda' for the device of the rank",
        ),
        ("cuda:1", 0, 1, "device 'cuda:1' does not exist, 1 CUDA device is visible: use"),
        ("cuda", 0, 0, "device 'cuda' is not available, torch sees no CUDA device: use device"),
    ],
)
def test_a_missing_device_is_reported_in_one_line(
    device: str, local_rank: int, visible: int, line: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        cuda_device(torch.device(device), local_rank, visible)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_mesh_on_missing_devices_raises_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LayoutError, match="LOCAL_RANK is 3, but 2 CUDA devices are visible"):
        Mesh.bind(ParallelLayout(), device="cuda")
    monkeypatch.setenv("LOCAL_RANK", "three")
    with pytest.raises(LayoutError, match="environment variable LOCAL_RANK is 'three': set"):
        local_device("cuda")


def test_cpus_are_shared_and_need_no_index() -> None:
    assert local_device("cpu") == torch.device("cpu")
    assert device_identity(torch.device("cpu")) is None


def test_two_ranks_with_one_device_are_refused_on_all_ranks(
    worker_pool: WorkerPool,
) -> None:
    def run(rank: Rank) -> str:
        device = ["H200 GPU-a of one", "H200 GPU-b of one", "H200 GPU-a of one"][rank.rank]
        world = {"rank": rank.rank, "ranks": range(3), "timeout": timedelta(seconds=60)}
        agree(default_store(), "processors", {}, own={"CUDA device": None}, **world)
        try:
            agree(default_store(), "devices", {"a": "b"}, own={"CUDA device": device}, **world)
        except LayoutError as error:
            return str(error)
        return ""

    line = "every rank needs a CUDA device of its own: ranks 0, 2 share H200 GPU-a of one"
    assert worker_pool.run(run, ranks=3, timeout=120) == [line] * 3


def test_the_pool_uses_the_backend_of_mesh_bind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[str] = []

    def init(backend: str, **_: Any) -> None:
        joined.append(backend)

    monkeypatch.setattr(dist, "init_process_group", init)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    for device in ("cpu", "cuda"):
        init_default_group(torch.device(device), timedelta(seconds=60))
    assert joined == ["gloo", "nccl"] == [backend_of("cpu"), backend_of("cuda")]
    with WorkerPool(1, device="cuda") as pool:  # no ranks are started
        assert pool.backend == "nccl"  # without a Gloo group in addition
