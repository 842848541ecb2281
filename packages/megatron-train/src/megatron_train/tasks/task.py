"""The interface between the trainer and the model that it trains.

Trainer and engine are independent of the kind of model and of the number of ranks. A task gives
them sums over tokens and the denominators that these sums are divided by.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from megatron_ckpt import ModelRecord
from megatron_models import Measure
from megatron_parallel import TensorSpec, to_device
from megatron_parallel.context_parallel import ContextSplit
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The input of one forward pass on this rank.

    Attributes:
        fields: Tensors by name. Only the task reads them.
        samples: Number of samples of the global batch that are counted with this micro-batch.
        tokens: Number of tokens of the global batch that are counted with this micro-batch,
            including masked ones.
        context_split: Positions of the sequences that each context-parallel rank holds. None
            without context parallelism, and before `Task.context_parallel_slice` if the task
            chooses the split.
        loss_denominators: Denominator of each loss for the mean over the whole micro-batch. Empty
            if every unmasked token of the global batch has the same weight.
    """

    fields: Mapping[str, Tensor]
    samples: int
    tokens: int
    context_split: ContextSplit | None = None
    loss_denominators: Mapping[str, float | Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Tensor], token_field: str) -> "MicroBatch":
        """Returns a micro-batch with the numbers of samples and tokens of one of its fields.

        Args:
            fields: Tensors by name.
            token_field: Name of a field ``[b, s]``; it has ``b`` samples and ``b * s`` tokens.
        """
        return cls(fields, len(fields[token_field]), fields[token_field].numel())

    def with_fields(self, **fields: Tensor) -> "MicroBatch":
        """Returns a copy with these fields replaced or added."""
        return dataclasses.replace(self, fields={**self.fields, **fields})

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns a copy on a device; the transfers may still be in progress."""
        split = self.context_split
        split = None if split is None else split.to(device)
        fields = {name: to_device(tensor, device) for name, tensor in self.fields.items()}
        return dataclasses.replace(self, fields=fields, context_split=split)


def field_sum(batches: Sequence[MicroBatch], name: str) -> float | Tensor:
    """Returns the sum of a field over micro-batches, for `Task.denominators`.

    The sum is a number if the field is on the host, and a float64 scalar if it is on the device.
    """
    sums = [batch.fields[name].double().sum() for batch in batches]
    on_device = any(one.device.type != "cpu" for one in sums)
    return torch.stack(sums).sum() if on_device else sum(map(float, sums))


def labels_with_loss(fields: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Returns the labels, -100 for those that the loss mask leaves out.

    `LinearCrossEntropy` may compute gradients before it knows the mask.
    """
    return fields[f"{prefix}labels"].masked_fill(fields[f"{prefix}loss_mask"] == 0, -100)


class Task(Protocol):
    """What is trained and how: stages, inputs, losses and denominators, on one rank."""

    @property
    def model_record(self) -> ModelRecord:
        """The model's kind, family and configuration, as checkpoints record them."""

    def migrated_config(self, record: ModelRecord) -> Mapping[str, Any]:
        """Returns the configuration in a checkpoint's record, in the format of `model_record`.

        Raises:
            ValueError: The record is of another kind of model, or its version is unknown.
        """

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The stages that this rank holds, in the order of the forward pass."""

    def fsdp_units(self, stage: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules of a stage that FSDP gathers one at a time, usually its blocks."""

    @property
    def losses(self) -> Sequence[str]:
        """Names of the losses."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of sums that are reported beside the losses, such as an accuracy.

        `denominators` and `loss` return them as well. They have no gradient, and a value that is
        not finite neither ends the run nor skips a step.
        """

    @property
    def auxiliary_losses(self) -> Sequence[str]:
        """Names of the losses that layers have of their own (`megatron_parallel.AuxiliaryLosses`).

        In a training step, stages are called with the keyword argument ``auxiliary_losses``, an
        object to which a layer attaches its losses. It names there the axes whose ranks all have
        the same value.
        """

    def denominators(self, batches: Sequence[MicroBatch]) -> Mapping[str, float | Tensor]:
        """Returns the denominators of all losses and metrics, computed from labels and masks alone.

        They are numbers if the fields are on the host. If `PreparingTask.prepare` computed labels
        or masks on the device, they are scalars there, for which the host does not wait.

        Auxiliary losses are included. The engine calls this method with the micro-batches of this
        rank before the first forward pass of a step and sums the results over the ranks, so that
        a gradient is never an average of averages.
        """

    def context_parallel_slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this context-parallel rank's slice of a micro-batch.

        Called only with context parallelism, where the slice is a part of every sequence, and in a
        pool (`megatron_train.document_pool`), where it is a part of a row. `stage_inputs`,
        `stage_output_spec` and `loss` are called with the result, which must have a
        ``context_split``.
        """

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Any]:
        """Returns the keyword arguments of a stage for a micro-batch.

        The output of the previous stage is the stage's first positional argument and is not
        included.

        Args:
            batch: The micro-batch.
            stage: Index of the stage.
            iteration: Number of the step, from 1; None in an evaluation.
        """

    def stage_output_spec(
        self, batch: MicroBatch, stage: int
    ) -> TensorSpec | tuple[TensorSpec, ...]:
        """Returns shape and dtype of a stage's output.

        Every rank calls it for every stage of a pipeline. Tasks of one stage do not need it.
        """

    def loss(self, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the sum of each loss and metric of a micro-batch from the last stage's output."""

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the FLOPs of a forward and backward pass of the whole model."""


@runtime_checkable
class PreparingTask(Protocol):
    """A task that computes further inputs of a step: teacher or reference outputs, rollouts."""

    def prepare(self, batches: Sequence[MicroBatch], iteration: int | None) -> Sequence[MicroBatch]:
        """Returns the micro-batches of a step with the inputs that the task computes.

        Called without gradients on every rank, with this rank's micro-batches, before
        `Task.denominators`. All ranks call it at the same point of a step, so it may communicate.
        It may return other micro-batches, the same number on every data-parallel rank.

        Args:
            batches: The micro-batches as they were read.
            iteration: Number of the step, from 1; None in an evaluation.
        """


@runtime_checkable
class CountingTask(Protocol):
    """A task whose layers count values for reports, such as the load of experts.

    In a training step, layers add their counts to the argument ``auxiliary_losses`` of stages
    (`megatron_parallel.AuxiliaryLosses.count`).
    """

    @property
    def counters(self) -> Mapping[str, int]:
        """The number of values under each name that layers count under; empty counts nothing."""

    def measures(self, counts: Mapping[str, Sequence[float]]) -> Mapping[int, Sequence[Measure]]:
        """Returns what reports show of each layer, by number of the layer.

        Args:
            counts: Values by name, summed over the global batches of one or several steps.
        """


@runtime_checkable
class SummarizingTask(Protocol):
    """A task that reports values which are no means over samples, such as an F1 score.

    They are computed from sums over all samples of a log line's interval or of an evaluation, so
    that they do not depend on batches or ranks.
    """

    @property
    def tallies(self) -> Sequence[str]:
        """Names of those `Task.metrics` that only `summaries` reads and that are not reported."""

    def summaries(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Returns further values to report by name.

        Args:
            sums: Sum of each loss and metric over the samples.
        """


def reported_values(
    task: object, sums: Mapping[str, float], denominators: Mapping[str, float]
) -> dict[str, float]:
    """Returns the mean of each loss and metric, and the summaries of a `SummarizingTask`.

    Values with a denominator of 0 are NaN.

    Args:
        task: The task that the sums are of, or None for means alone.
        sums: Sums by name.
        denominators: Denominator of each sum.
    """
    means = {
        name: total / denominators[name] if denominators[name] else math.nan
        for name, total in sums.items()
    }
    if isinstance(task, SummarizingTask):
        kept = {name: mean for name, mean in means.items() if name not in task.tallies}
        return kept | dict(task.summaries(sums))
    return means


def layer_values(task: object, counts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the measures of each layer by their names in files: ``<measure>_layer_<number>``."""
    if not counts or not isinstance(task, CountingTask):
        return {}
    return {
        f"{measure.name}_layer_{layer}": measure.value
        for layer, found in task.measures(counts).items()
        for measure in found
    }


def unusable_layers(task: Task, counts: Mapping[str, Sequence[float]]) -> list[str]:
    """Returns why layers make a step unusable, with remedies (`Measure.remedy`)."""
    if not counts or not isinstance(task, CountingTask):
        return []
    return [
        f"layer {layer}: {measure.value:g} {measure.title}, {measure.remedy}"
        for layer, found in task.measures(counts).items()
        for measure in found
        if measure.remedy
    ]


def worst_layers(task: Task, counts: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, int]]:
    """Returns the worst value of each measure with its layer, by title of the measure."""
    if not counts or not isinstance(task, CountingTask):
        return {}
    found: dict[str, tuple[float, int]] = {}
    for layer, measures in task.measures(counts).items():
        for measure in measures:
            if not math.isfinite(measure.value):
                continue
            sign = 1 if measure.worst == "largest" else -1
            before = found.get(measure.title)
            if before is None or sign * measure.value > sign * before[0]:
                found[measure.title] = measure.value, layer
    return found
