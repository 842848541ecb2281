"""If a rank dies or freezes in a sum of gradients, the others end with one line that names it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TIMEOUT = 3.0
CODE = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_parallel import CollectiveError, GradientBuffers, Mesh, ParallelLayout, Sharding

rank, world, store, how, layout = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
timeout = timedelta(seconds=float(sys.argv[6]))
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
mesh = Mesh.bind(ParallelLayout(tp=int(layout)), timeout=timeout)
weights = {name: torch.nn.Parameter(torch.ones(100_000)) for name in "ab"}
buffers = GradientBuffers(weights, dict.fromkeys(weights, Sharding((100_000,))), mesh)
print("ready", flush=True)
sys.stdin.readline()
try:
    for step in range(1_000_000):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        buffers.begin(last=True)
        sum(weights.values()).sum().backward()
        buffers.finish()
        buffers.zero()
except CollectiveError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
"""


class Job:
    """A job of plain processes, which all enter the loop at the same time."""

    def __init__(self, folder: Path, how: str, world: int, tp: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment.pop("WORLD_SIZE", None)
        rest = [str(world), str(folder / "store"), how, str(tp), str(TIMEOUT)]
        pipe = subprocess.PIPE
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", CODE, str(rank), *rest],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                env=environment,
            )
            for rank in range(world)
        ]

    def run(self) -> dict[int, str]:
        """Returns the output of each rank but 1, which does not continue before the others end."""
        for rank in self.ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        said = {}
        for number, rank in enumerate(self.ranks):
            if number != 1:
                said[number] = rank.communicate(timeout=120)[1]
                assert rank.returncode == 1
        return said

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    started = Job(tmp_path, *request.param)
    yield started
    started.end()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals")
@pytest.mark.parametrize(
    "job",
    [("dies", 2, 1), pytest.param(("freezes", 3, 1), marks=pytest.mark.slow)],
    ids=["dies", "freezes"],
    indirect=True,
)
def test_the_rank_the_axis_and_the_operation_are_named(job: Job) -> None:
    said = job.run()
    ranks = f"ranks 0-{len(job.ranks) - 1}"
    for text in said.values():
        assert text.count("\n") == 1
        assert text.startswith("rank 1 did not join all_reduce of gradient bucket 1 of 1 ('b' ...)")
        assert f"on axis 'dp' ({ranks}): dead, suspended or late" in text
