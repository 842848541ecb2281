"""The results of a step, which are read from the device only when they are needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from megatron_parallel import HostCopy
from torch import Tensor

from megatron_train.tasks.task import Task, reported_values
from megatron_train.transfer import pack

HOST = torch.device("cpu")


class _Read(NamedTuple):
    grad_norm: float
    updated: bool
    finite: bool
    sums: Mapping[str, float]
    denominators: Mapping[str, float]
    counts: Mapping[str, Sequence[float]]
    loss_scale: float
    statistics: Mapping[str, float]


class StepValues:
    """Numbers of a step on their way from the device to the host.

    Args:
        sums: Sum of each loss and metric over the unmasked tokens of the global batch.
        denominators: Denominator of each sum.
        grad_norm: Norm of the gradient over all parameters, before clipping.
        updated: Whether the parameters were updated; a step that is not finite is skipped.
        finite: Whether losses and gradient norm were finite, or only scaled gradients overflowed.
        counts: What layers counted over the global batch, by name (`CountingTask`).
        device: Device of the tensors among them.
        loss_scale: Loss scale of the step; None without one.
        statistics: Scalars about gradients and parameters by name; in some steps only.
    """

    def __init__(
        self,
        sums: Mapping[str, float | Tensor],
        denominators: Mapping[str, float | Tensor],
        grad_norm: float | Tensor,
        updated: bool | Tensor,
        finite: bool | Tensor,
        counts: Mapping[str, Tensor] | None = None,
        device: torch.device = HOST,
        loss_scale: float | Tensor | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        counts, statistics = counts or {}, statistics or {}
        self._names = tuple(sums), tuple(denominators), tuple(statistics)
        self._lengths = {name: len(values) for name, values in counts.items()}
        self._scaled = loss_scale is not None
        scale = () if loss_scale is None else (loss_scale,)
        scalars = (grad_norm, updated, finite, *scale, *sums.values(), *denominators.values())
        scalars += (*statistics.values(),)
        self._copy = HostCopy(torch.cat([pack(scalars, device), *counts.values()]))

    @property
    def ready(self) -> bool:
        """Whether `read` returns without waiting for the device."""
        return "read" in vars(self) or self._copy.arrived

    @cached_property
    def read(self) -> _Read:
        """The numbers. Waits until the step has ended on the device."""
        norm, updated, finite, *rest = self._copy.read().tolist()
        following = iter(rest)
        scale = next(following) if self._scaled else 1.0
        named = (dict(zip(each, following, strict=False)) for each in self._names)
        sums, denominators, statistics = named
        counts = {name: list(islice(following, size)) for name, size in self._lengths.items()}
        return _Read(
            norm, bool(updated), bool(finite), sums, denominators, counts, scale, statistics
        )


@dataclass(frozen=True)
class StepReport:
    """The results of one step.

    Sums, denominators, counts, the norm and whether the step was finite are read from the device
    when they are first used. This waits until the step has ended there, unless `ready`.

    Attributes:
        iteration: Number of the step, from 1.
        consumed_samples: Samples consumed by the run, including this step.
        learning_rate: Learning rate of the step.
        seconds: Duration of the step on the host, including loading of its samples. On a GPU, the
            device ends the step later; over several steps, both take the same time.
        samples: Number of samples in the step.
        tokens: Number of tokens in the step, including masked ones.
        flops: FLOPs of the forward and backward pass.
        values: The numbers that come from the device.
        task: Task of the step, which may summarize its sums (`SummarizingTask`).
    """

    iteration: int
    consumed_samples: int
    learning_rate: float
    seconds: float
    samples: int
    tokens: int
    flops: float
    values: StepValues
    task: Task | None = None

    @property
    def ready(self) -> bool:
        """Whether all values can be read without waiting for the device."""
        return self.values.ready

    @property
    def sums(self) -> Mapping[str, float]:
        """Sum of each loss and metric over the unmasked tokens of the global batch."""
        return self.values.read.sums

    @property
    def denominators(self) -> Mapping[str, float]:
        """Denominator of each sum."""
        return self.values.read.denominators

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient over all parameters, before clipping."""
        return self.values.read.grad_norm

    @property
    def updated(self) -> bool:
        """Whether the parameters were updated; a step that is not finite is skipped."""
        return self.values.read.updated

    @property
    def finite(self) -> bool:
        """Whether losses and gradient norm were finite, or only scaled gradients overflowed."""
        return self.values.read.finite

    @property
    def loss_scale(self) -> float:
        """Loss scale of the step; 1 without one."""
        return self.values.read.loss_scale

    @property
    def statistics(self) -> Mapping[str, float]:
        """Numbers about gradients and parameters by name; none in most steps."""
        return self.values.read.statistics

    @property
    def counts(self) -> Mapping[str, Sequence[float]]:
        """What layers counted over the global batch, by name (`CountingTask`)."""
        return self.values.read.counts

    @property
    def losses(self) -> dict[str, float]:
        """What is reported of the step: means per unmasked token or sample, and summaries."""
        return reported_values(self.task, self.sums, self.denominators)


class UnreadReports:
    """Reports of steps in order, until their values have arrived."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        """Appends the report of the next step."""
        self._reports.append(report)

    def take(self, *, wait: bool = False) -> list[StepReport]:
        """Removes and returns the first reports that are ready; all of them with ``wait``."""
        count = 0
        while count < len(self._reports) and (wait or self._reports[count].ready):
            count += 1
        taken, self._reports = self._reports[:count], self._reports[count:]
        return taken
