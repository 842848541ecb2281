"""Runs the steps of one rank on an imagined device."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from megatron_parallel import Mesh
from megatron_parallel.collectives import Traffic
from megatron_parallel.imagined import DeviceLedger, imagined_device

from megatron_train.assembly import build_trainer, choose_dtype
from megatron_train.config.run import RunConfig
from megatron_train.dry_run.counts import Counts, RankUse
from megatron_train.dry_run.repetition import find_repetition
from megatron_train.errors import TrainError
from megatron_train.step_report import StepReport
from megatron_train.tasks.kinds import find_task_kind
from megatron_train.tasks.task import MicroBatch
from megatron_train.trainer import Callback, Trainer

PARAMETERS: Final = "parameters"
OPTIMIZER: Final = "optimizer state"
GRADIENTS: Final = "gradients and buffers"
"""Parts of memory that exist between steps."""


@dataclass(frozen=True)
class SameBatches:
    """Equal micro-batches, in steps of `sizes`; see `megatron_train.broadcast_batches.Batches`."""

    batch: MicroBatch
    sizes: Sequence[int]
    has_test: bool = False
    no_test_reason: str = ""

    def training(self, consumed_samples: int) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each step."""
        for size in self.sizes:
            yield [self.batch] * size

    def validation(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields nothing."""
        return iter(())

    testing = validation


def imagine_rank(
    run: RunConfig, rank: int, device: torch.device, *, memory_only: bool = False
) -> RankUse:
    """Returns what one rank of a run needs and does in a step, from a run without values.

    Runs a step with as many micro-batches in flight as in a whole step, for the memory; a short
    step; and one that is longer by a period of the schedule. Counts of the whole step follow from
    the last two.

    Args:
        run: The run, with a resolved layout.
        rank: The rank.
        device: Device to imagine, "cuda" or "cpu".
        memory_only: Runs the first of these steps alone, of which `RankUse.counts` then are.

    Raises:
        NoGuardError: A CUDA device cannot be imagined in this process.
    """
    start = time.monotonic()
    pipeline_rank = run.layout.coordinates(rank).pp
    repetition = find_repetition(run, pipeline_rank)
    sizes = repetition.sizes[:1] if memory_only else repetition.sizes
    batch = proof_batch(run)
    with Mesh.imagined(run.layout, rank, device) as mesh, imagined_device(device) as ledger:
        with ledger.storages.part(GRADIENTS):
            trainer = imagine_trainer(run, mesh, batch, sizes)
        _label(trainer, ledger)
        with mesh.counting() as traffic:
            measured = _Measurement(ledger, traffic)
            trainer.callbacks = [measured]
            trainer.run()
    counts = measured.steps[0]
    if not memory_only:
        counts = measured.steps[2].extrapolated(measured.steps[-1], repetition.times)
    return RankUse(
        rank=rank,
        pipeline_rank=pipeline_rank,
        stages=run.layout.stages(pipeline_rank),
        layers=sum(len(run.layer_split[stage]) for stage in run.layout.stages(pipeline_rank)),
        micro_batches=repetition.whole,
        run_micro_batches=repetition.memory,
        memory=measured.memory,
        peak=measured.peak,
        at_peak=measured.at_peak,
        counts=counts,
        seconds=time.monotonic() - start,
    )


def proof_batch(run: RunConfig) -> MicroBatch:
    """Returns a micro-batch of a run on the host, with values.

    Raises:
        TrainError: The task has no samples.
    """
    data = find_task_kind(run.task).open_proof_data(run)
    samples = range(run.training.micro_batch_size)
    dataset = data.datasets((len(samples), 0, 0)).train
    if dataset is None:
        raise TrainError(f"the task {run.task} has no samples for a dry run")
    return data.micro_batch(data.read(dataset, samples))


def imagine_trainer(run: RunConfig, mesh: Mesh, batch: MicroBatch, sizes: Sequence[int]) -> Trainer:
    """Returns the trainer of a rank, without callbacks; call it within `imagined_device`.

    Args:
        run: The run, with a resolved layout.
        mesh: An imagined mesh.
        batch: Every micro-batch.
        sizes: Number of micro-batches of each step.
    """
    batches = SameBatches(batch, sizes)
    trainer = build_trainer(run, find_task_kind(run.task), batches, mesh, choose_dtype(run))
    trainer.train_iters = len(sizes)
    return trainer


class _Measurement(Callback):
    """Counts every step of a run, and takes the memory of the first.

    Attributes:
        steps: The counts of each step.
        memory: Bytes that are allocated after the first step, by part.
        peak: Largest number of bytes in the first step.
        at_peak: Bytes that are allocated then, by part and code line.
    """

    def __init__(self, ledger: DeviceLedger, traffic: Traffic) -> None:
        self.steps: list[Counts] = []
        self.memory: dict[str, int] = {}
        self.peak = 0
        self.at_peak: dict[tuple[str, str], int] = {}
        self._ledger, self._traffic = ledger, traffic
        self._messages: Counter[tuple[str, str]] = Counter()
        self._message_bytes: Counter[tuple[str, str]] = Counter()

    def on_start(self, trainer: Trainer) -> None:
        """Starts to count."""
        self._ledger.clear()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Takes the counts of the step and of what followed the one before."""
        records = self._traffic.records
        messages = Counter({(r.axis, r.operation): r.calls for r in records})
        message_bytes = Counter({(r.axis, r.operation): r.nbytes for r in records})
        new = messages - self._messages, message_bytes - self._message_bytes
        self._messages, self._message_bytes = messages, message_bytes
        self.steps.append(Counts.of(self._ledger, *new))
        storages = self._ledger.storages
        if len(self.steps) == 1:
            self.memory, self.peak = dict(storages.by_part()), storages.peak
            self.at_peak = dict(storages.at_peak())
        self._ledger.clear()


def _label(trainer: Trainer, ledger: DeviceLedger) -> None:
    """Labels the memory that was allocated while the trainer was built."""
    state = (view.tensor for views in trainer.optimizer.views().values() for view in views)
    ledger.storages.relabel(OPTIMIZER, state)
    ledger.storages.relabel(PARAMETERS, trainer.engine.stages.parameters.values())
