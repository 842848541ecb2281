"""A killed, suspended or differently configured rank ends `megatron-train` with one line.

Each trial trains a small GPT on Gloo and kills or suspends one of its ranks at a random time. The
line names the rank, the axis and the operation that waits for it. No process hangs or remains.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_data import IndexedDatasetBuilder
from megatron_train.launch.environment import free_port
from megatron_train.launch.supervisor import GRACE
from waiting import HANG, wait_until

TIMEOUT = 15.0  # time-out of every collective in seconds
WORDS = (
    "pretrain gpt --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--vocab-size 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 1000000 --lr 1e-4 "
    f"--eval-iters 0 --train-data-path text --distributed-timeout-minutes {TIMEOUT / 60} "
    "--log-interval 1"
)
TWO_RANKS = {
    "tp": "--tensor-model-parallel-size 2",
    "sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp": "--pipeline-model-parallel-size 2",
    "cp": "--context-parallel-size 2",
    "ep": "--num-experts 4 --expert-model-parallel-size 2",
    "dp": "",
    "sharded": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "fsdp": "--use-torch-fsdp2",
}
WHERE = re.compile(
    r"(?:(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|exchange|send|receive|agreement)"
    r"|did not (send|receive) the (activations|gradient) of micro-batch \d+)"
    r".* on axis '\w+'"
)
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@dataclass(frozen=True)
class Trial:
    """A failure of one rank, in a layout with two ranks on each of the axes."""

    axes: str
    how: str
    seed: int

    @property
    def words(self) -> str:
        return " ".join([WORDS, *(TWO_RANKS[axis] for axis in self.axes.split("-"))])

    @property
    def ranks(self) -> int:
        return 2 ** len(self.axes.split("-"))

    def __str__(self) -> str:
        return f"{self.axes}-{self.how}-{self.seed}"


LOST = [
    Trial(axes, how, seed)
    for axes, seeds in {
        **dict.fromkeys(TWO_RANKS, 2),
        **dict.fromkeys(("tp-dp", "pp-dp", "tp-pp", "cp-dp", "sp-ep"), 1),
    }.items()
    for how in ("dies", "freezes")
    for seed in range(seeds)
]
DIFFERENT = [Trial(axes, "differs", seed) for seed, axes in enumerate(("tp", "pp", "cp", "fsdp"))]
STARTING = [(how, seed) for how in ("dies", "freezes") for seed in range(2)]
SAMPLE = {"cp-dies-0", "tp-differs-0"}


def sampled(trials: list[Trial]) -> pytest.MarkDecorator:
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "trial",
        [pytest.param(t, id=str(t), marks=() if str(t) in SAMPLE else slow) for t in trials],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with tokens to train on."""
    place = tmp_path_factory.mktemp("ranks-fail")
    with IndexedDatasetBuilder(str(place / "text"), "uint16") as builder:
        for start in range(50):
            builder.add_item([(start + i) % 64 for i in range(80)])
            builder.end_document()
        builder.finalize()
    return place


class Job:
    """A running `megatron-train` with several ranks."""

    def __init__(self, folder: Path, words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("WORLD_SIZE", None)
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("megatron-train"), *words.split()],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._trains = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_training(self) -> None:
        """Waits for the first steps; fails if the job ends before."""
        deadline = time.monotonic() + 200
        while not self._trains.wait(0.1):
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline, self.lines

    def ranks(self) -> dict[int, int]:
        """Returns the process numbers of the ranks."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    rank = next(v for v in variables if v.startswith(b"RANK=")).partition(b"=")[2]
                    found[int(rank)] = int(entry.name)
        return found

    def end(self) -> tuple[str, int]:
        """Returns standard error and exit status; kills a job that hangs."""
        hung = threading.Timer(TIMEOUT + GRACE + HANG, self.process.kill)
        hung.start()
        errors = self.process.stderr.read()
        hung.cancel()
        self._reader.join()
        return errors, self.process.wait()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(r"iteration +3/", line):
                self._trains.set()


@pytest.fixture
def start(folder) -> Iterator:
    """Returns a function that starts a job, which is killed after the test."""
    jobs = []

    def begin(words: str) -> Job:
        jobs.append(Job(folder, words))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait()


def test_fifty_trials_cover_every_axis():
    assert len(LOST) + len(DIFFERENT) + len(STARTING) >= 50
    assert {str(trial) for trial in LOST + DIFFERENT} >= SAMPLE


@sampled(LOST)
def test_a_rank_lost_during_training_is_named_with_axis_and_operation(trial, start):
    luck = random.Random(f"{trial}")
    job = start(f"{trial.words} --nproc-per-node {trial.ranks}")
    job.wait_for_training()
    time.sleep(luck.random())
    victim = luck.randrange(trial.ranks)
    ranks = job.ranks()
    assert set(ranks) == set(range(trial.ranks))
    number = signal.SIGKILL if trial.how == "dies" else signal.SIGSTOP
    os.kill(ranks[victim], number)
    errors, status = job.end()
    assert errors.startswith("megatron-train: error: ") and errors.count("\n") == 1, errors
    fate = "was killed by SIGKILL" if trial.how == "dies" else "is suspended (SIGSTOP)"
    assert f"error: rank {victim} {fate}" in errors
    assert status == (128 + number if trial.how == "dies" else 1)
    assert re.search(rf"; rank \d: .*\brank {victim}\b", errors), errors
    assert WHERE.search(errors), errors
    assert not any(map(alive, ranks.values()))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seed"), STARTING)
def test_a_rank_lost_during_the_start_is_named(how, seed, start):
    luck = random.Random(f"start-{how}-{seed}")
    job = start(f"{WORDS} --nproc-per-node 2")
    wait_until(lambda: set(job.ranks()) == {0, 1})
    ranks = job.ranks()
    time.sleep(luck.random())
    victim = luck.randrange(2)
    os.kill(ranks[victim], signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    errors, status = job.end()
    assert status == (137 if how == "dies" else 1)
    assert errors.startswith("megatron-train: error: ") and errors.count("\n") == 1, errors
    assert f"rank {victim} " in errors
    if how == "freezes":  # the parent notices a dead rank before other ranks do
        assert "start-up of axis 'world'" in errors
    assert not any(map(alive, ranks.values()))


@sampled(DIFFERENT)
def test_ranks_of_torchrun_with_different_settings_name_them(trial, folder):
    victim = random.Random(f"{trial}").randrange(2)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared = {**os.environ, **address, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(sys.executable).with_name("megatron-train")
    ranks = [
        subprocess.Popen(
            [
                script,
                *trial.words.split(),
                "--hidden-dropout",
                "0.25" if rank == victim else "0.5",
            ],
            cwd=folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 1
            lines = [line for line in errors.splitlines() if line.startswith("megatron-train")]
            assert len(lines) == 1, errors
            assert lines[0].startswith(f"megatron-train: error: rank {rank}: ranks disagree on ")
            sides = ("0.25", "0.5") if victim == 0 else ("0.5", "0.25")
            assert f"--hidden-dropout: rank 0: {sides[0]}; rank 1: {sides[1]}" in lines[0]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
