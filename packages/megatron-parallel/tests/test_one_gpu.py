"""NCCL, streams and ranks that share a device, on one CUDA device."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_parallel.collectives import ExposedTime
from megatron_parallel.collectives.watchdog import Watchdog, marker_factory
from megatron_parallel.testing import Rank, WorkerPool
from waiting import HANG, wait_until

NCCL = pytest.mark.gpu(real="NCCL")
STREAM = pytest.mark.gpu(real="its stream runs behind the host")
CYCLES = 500_000_000  # about a quarter of a second of GPU clock cycles

SHARED = """
import os, sys
from datetime import timedelta
from megatron_parallel import LayoutError, Mesh, ParallelLayout

try:
    Mesh.bind(ParallelLayout(dp=2), device="cuda:0", timeout=timedelta(seconds=60))
except LayoutError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
"""


def gathered(rank: Rank) -> object:
    found: list[object] = [None]
    dist.all_gather_object(found, {"rank": rank.rank})
    return found


def broadcasted(rank: Rank) -> object:
    values: list[object] = ["a text", 3]
    dist.broadcast_object_list(values, src=0)
    return values


def waited(rank: Rank) -> object:
    dist.barrier(device_ids=[rank.device.index])
    return "passed"


def summed_in_float64(rank: Rank) -> object:
    total = torch.full((3,), 1 / 3, dtype=torch.float64, device=rank.device)
    dist.all_reduce(total)
    return total.tolist()


def host_refused(rank: Rank) -> object:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return "No backend type associated with device type cpu" in str(error)
    return False


ALONE: dict[str, tuple[Callable[[Rank], object], object]] = {
    "gather of objects": (gathered, [{"rank": 0}]),
    "broadcast of objects": (broadcasted, ["a text", 3]),
    "barrier": (waited, "passed"),
    "float64": (summed_in_float64, [1 / 3] * 3),
    "a tensor of the host": (host_refused, True),
}


@NCCL
@pytest.mark.parametrize("name", ALONE)
def test_one_rank_of_nccl(name: str) -> None:
    act, expected = ALONE[name]
    with WorkerPool(1, device="cuda") as pool:
        assert pool.run(act, ranks=1, timeout=HANG) == [expected]


@NCCL
def test_two_ranks_on_one_gpu_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkerPool(1) as pool:
        port = pool.run(free_port, ranks=1)[0]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in shared.items():
        monkeypatch.setenv(name, value)
    ranks = []
    for number in range(2):
        monkeypatch.setenv("RANK", str(number))
        line = [sys.executable, "-c", SHARED]
        ranks.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True))
    for rank in ranks:
        _, said = rank.communicate(timeout=HANG)
        assert rank.returncode == 1 and said.count("\n") == 1
        assert said.startswith("every rank needs a CUDA device of its own: ranks 0-1 share ")


def free_port(rank: Rank) -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@STREAM
def test_a_marker_is_reached_when_the_stream_reaches_it() -> None:
    mark = marker_factory(torch.device("cuda"))
    assert mark is not None
    torch.cuda._sleep(CYCLES)
    marker = mark()
    assert marker is not None and not marker.query()
    torch.cuda.synchronize()
    assert marker.query()


@STREAM
def test_exposed_time_is_measured_on_the_stream_and_not_on_the_host() -> None:
    stall = ExposedTime(torch.device("cuda"))
    since = time.perf_counter()
    with stall.measure():
        torch.cuda._sleep(CYCLES)
    assert time.perf_counter() - since < stall.seconds
    assert stall.seconds > 0.05


@pytest.mark.gpu
def test_a_complete_operation_is_not_overdue(device: torch.device) -> None:
    class Sum:
        axis_name, description = "tp", "all_reduce"

        def failure_reported(self) -> bool:
            return False

        def diagnose(self, cause: str) -> str:
            raise AssertionError(cause)

    mark = marker_factory(device)
    assert mark is not None
    dog = Watchdog(mark, lambda: None, HANG)
    torch.ones(1000, device=device).sum()
    dog.watch(Sum())
    wait_until(lambda: dog.last_completed("tp") == "all_reduce")
    dog.close()
