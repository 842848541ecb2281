"""Trains a small copy of a run in its layout and on one rank, and compares the two."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Final

import torch
from megatron_parallel import Mesh
from megatron_parallel.testing import WorkerPool

from megatron_train.assembly import build_trainer
from megatron_train.broadcast_batches import open_batches
from megatron_train.config.run import RunConfig
from megatron_train.prove.compare import Deviation, Differences, compare, first_deviation
from megatron_train.prove.defects import CATALOGUE, find_defect
from megatron_train.prove.planting import planting
from megatron_train.prove.record import (
    Outcome,
    RecordingOptimizer,
    make_asymmetric,
    record_run,
)
from megatron_train.prove.shrink import ShrunkRun
from megatron_train.step_report import StepReport
from megatron_train.tasks.kinds import find_task_kind
from megatron_train.trainer import Callback, Trainer

HANG: Final = 3600.0
"""Seconds after which a training counts as hung."""

_POLL: Final = 0.2

Progress = Callable[[int, int], None]
"""Called with the number of finished steps and of all steps."""


@dataclass(frozen=True)
class Proof:
    """The result of a proof.

    Attributes:
        differences: Largest differences.
        first: The first difference; None if the layout equals one rank.
        seconds: Duration.
        parameters: Number of parameters that were compared.
    """

    differences: Differences
    first: Deviation | None
    seconds: float
    parameters: int

    @property
    def equal(self) -> bool:
        """Whether the layout equals one rank."""
        return self.differences.equal


def prove(
    small: ShrunkRun,
    defect: str | None = None,
    progress: Progress | None = None,
    pool: WorkerPool | None = None,
) -> Proof:
    """Trains a small run in its layout, with a planted defect if any, and on one rank.

    Args:
        small: The run.
        defect: Name of a defect (`megatron_train.prove.defects`).
        progress: Called while ranks train.
        pool: Processes to use. Defaults to new ones, which end with the proof.

    Raises:
        TrainError: The layout cannot have the defect, or the task has no samples for proofs.
        WorkerError: A rank failed.
    """
    run = small.run
    if defect is not None:
        find_defect(defect, run)
    find_task_kind(run.task).open_proof_data(run)  # refused before processes start
    start, steps = time.monotonic(), run.train_iters
    with (
        tempfile.TemporaryDirectory(prefix="megatron-prove-") as folder,
        _started(run) if pool is None else nullcontext(pool) as ranks,
        _watched(Path(folder), 2 * steps, progress),
    ):
        file = str(Path(folder) / "steps")
        (whole,) = ranks.run_mesh(
            small.one_rank.layout, train_on_rank, small.one_rank, None, file, timeout=HANG
        )
        found = ranks.run_mesh(run.layout, train_on_rank, run, defect, file, timeout=HANG)
    experts = run.model.expert_parallel and not run.layout.hybrid_cp
    differences = compare(found, whole, experts=experts)
    return Proof(
        differences=differences,
        first=None if differences.equal else first_deviation(found, whole),
        seconds=time.monotonic() - start,
        parameters=sum(values.numel() for _, _, values in whole.parameters),
    )


def _started(run: RunConfig) -> WorkerPool:
    timeout = run.training.distributed_timeout_minutes * 60
    return WorkerPool(run.layout.world_size, collective_timeout=timeout)


def train_on_rank(mesh: Mesh, run: RunConfig, defect: str | None, progress: str) -> Outcome:
    """Trains a run on one rank of its layout, and returns what it recorded.

    Args:
        mesh: Mesh of the layout.
        run: The run, in float64.
        defect: Name of a planted defect.
        progress: File to which rank 0 appends a byte after each step.
    """
    plants = {each.name: each.plant for each in CATALOGUE}
    with planting(None if defect is None else plants[defect], mesh):
        task = find_task_kind(run.task)
        batches = open_batches(run, lambda: task.open_proof_data(run), mesh)
        trainer = build_trainer(
            run,
            task,
            batches,
            mesh,
            torch.float64,
            optimizer=RecordingOptimizer,
            prepare=make_asymmetric,
        )
        if mesh.rank == 0:
            trainer.callbacks.append(_CountSteps(Path(progress)))
        return record_run(trainer, run.data.seq_length, every_step=True)


class _CountSteps(Callback):
    """Appends a byte to a file after each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        with self._path.open("ab") as file:
            file.write(b".")


@contextmanager
def _watched(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Reports the length of a file of steps in a thread until the end of the block."""
    if progress is None:
        yield
        return
    report, ended = progress, Event()

    def watch() -> None:
        path = folder / "steps"
        while not ended.wait(_POLL):
            report(path.stat().st_size if path.exists() else 0, total)
        report(path.stat().st_size if path.exists() else 0, total)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
