"""Trains a layout on the CPU and on the simulated device, as one rank runs it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import megatron_parallel.tensor_parallel.linear as linear
import torch
from layouts.case import Case
from layouts.defects import planted
from layouts.job import build_trainer
from layouts.models import SEQUENCE
from layouts.proof import LEARNING_RATE
from megatron_parallel import Mesh
from megatron_parallel.testing import Rank
from megatron_train import GPTTask, Trainer
from megatron_train.prove.planting import Plant, Replace, planting
from megatron_train.prove.record import Outcome, Piece, record_run
from megatron_train.tasks.task import MicroBatch
from simulated_device import simulated
from torch import Tensor


@dataclass(frozen=True)
class Report:
    """What one rank found.

    Attributes:
        deviation: Largest difference of any loss, norm, gradient and parameter; infinite if tokens
            went to other experts.
        waits: How often the host waited for the device in all steps, by code line.
        blocking_copies: Copies from pageable memory to the device in all steps, by code line.
    """

    deviation: float
    waits: Counter[str]
    blocking_copies: Counter[str]


def compare_devices(rank: Rank, case: Case, steps: int, defect: str | None) -> Report:
    """Trains on the CPU, then on the device with a planted defect if any; compares both."""
    expected = record_run(_trainer(rank.mesh(case.layout), case, steps), SEQUENCE)
    with simulated() as dispatch:
        layout = case.layout.resolve(rank.size)
        with (
            Mesh.bind(layout, device="cuda", timeout=rank.collective_timeout) as mesh,
            _planted(defect, mesh),
        ):
            trainer = _trainer(mesh, case, steps)
            dispatch.waits.clear()
            dispatch.blocking_copies.clear()
            found = record_run(trainer, SEQUENCE)
        waits, copies = Counter(dispatch.waits), Counter(dispatch.blocking_copies)
        return Report(largest_difference(_on_host(found), expected), waits, copies)


def _trainer(mesh: Mesh, case: Case, steps: int) -> Trainer:
    return build_trainer(mesh, case, steps, torch.float64, LEARNING_RATE)


def _on_host(outcome: Outcome) -> Outcome:
    def copies(pieces: Sequence[Piece]) -> list[Piece]:
        return [(name, offsets, values.cpu()) for name, offsets, values in pieces]

    return replace(
        outcome,
        gradients=[copies(pieces) for pieces in outcome.gradients],
        parameters=copies(outcome.parameters),
        routes={key: experts.cpu() for key, experts in outcome.routes.items()},
    )


def largest_difference(ours: Outcome, expected: Outcome) -> float:
    """Returns the largest difference of two outcomes of one rank; infinite if one lacks a value."""

    def numbers(outcome: Outcome) -> dict[Any, Tensor]:
        found: dict[Any, Tensor] = dict(outcome.routes)
        for name in ("losses", "norms"):
            found[name] = torch.tensor(getattr(outcome, name), dtype=torch.float64)
        for step, pieces in enumerate((*outcome.gradients, outcome.parameters)):
            found |= {(step, name, offsets): values for name, offsets, values in pieces}
        return found

    def difference(one: Tensor, other: Tensor) -> float:
        if one.shape != other.shape or one.dtype != other.dtype:
            return torch.inf
        if torch.equal(one, other):
            return 0.0
        if not one.is_floating_point():
            return torch.inf
        size = float((one - other).abs().max())
        return size if size == size else torch.inf

    own, others = numbers(ours), numbers(expected)
    if own.keys() != others.keys():
        return torch.inf
    return max(difference(values, others[key]) for key, values in own.items())


def _host_batches(mesh: Mesh, replace: Replace) -> None:
    replace(MicroBatch, "to", lambda self, device: self)


def _host_collective(mesh: Mesh, replace: Replace) -> None:
    true = linear.start_all_gather
    replace(linear, "start_all_gather", lambda part, axis: true(part.cpu(), axis))


def _value_read(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.loss

    def wrong(self: GPTTask, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        sums = true(self, output, batch)
        sums["lm loss"].item()
        return sums

    replace(GPTTask, "loss", wrong)


@dataclass(frozen=True)
class Defect:
    """A defect of a layout with `sp` and a language model.

    Attributes:
        finding: Regular expression of what is reported.
        plant: Plants it; None for a defect of the catalogue of layouts.
        sample: Whether it is also planted in `nox -s tests`.
    """

    finding: str
    plant: Plant | None = None
    sample: bool = False


DEFECTS: Final[Mapping[str, Defect]] = {
    "micro-batches stay on the host": Defect("at least two devices, cuda:0 and cpu", _host_batches),
    "a collective gets a host tensor": Defect(
        "No backend type associated with device type cpu", _host_collective
    ),
    "a loss is read for each micro-batch": Defect("waits rose from", _value_read, sample=True),
    "a gathered sequence's gradient is cut without being summed": Defect("differs from the CPU"),
}
"""Defects on the device only, by name; the run on the CPU has none."""


def _planted(defect: str | None, mesh: Mesh) -> AbstractContextManager[None]:
    if defect is not None and DEFECTS[defect].plant is None:
        return planted(defect, mesh)
    return planting(None if defect is None else DEFECTS[defect].plant, mesh)
