"""The contract between the trainer and what it trains.

The trainer never asks which model it trains, nor on how many ranks. It divides sums by
denominators, and both come from here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from megatron_ckpt import ModelRecord
from megatron_parallel import TensorSpec
from megatron_parallel.context_parallel import ContextSplit
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What this rank computes at a time.

    Attributes:
        fields: tensors by name, which only the task looks into.
        samples: how many samples of the global batch are counted with it.
        tokens: how many tokens of the global batch are counted with it, masked ones included.
        split: which places of its sequences each rank has that it is cut over. None where no
            context parallelism cuts it, and before `Task.cut` where the task decides.
        divisors: what each loss is divided by for the mean of the whole micro-batch; empty where
            every true token has the same weight.
    """

    fields: Mapping[str, Tensor]
    samples: int
    tokens: int
    split: ContextSplit | None = None
    divisors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, fields: Mapping[str, Tensor], by: str) -> "MicroBatch":
        """Returns a micro-batch whose samples and tokens are those of one of its fields.

        Args:
            fields: tensors by name.
            by: name of a field ``[b, s]``.
        """
        return cls(fields, len(fields[by]), fields[by].numel())

    def replaced(self, **fields: Tensor) -> "MicroBatch":
        """Returns the same with other fields, or more."""
        return dataclasses.replace(self, fields={**self.fields, **fields})

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns the same on a device; copies need not have ended."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        split = None if self.split is None else ContextSplit(moved(self.split.places))
        fields = {name: moved(tensor) for name, tensor in self.fields.items()}
        return dataclasses.replace(self, fields=fields, split=split)


class Task(Protocol):
    """One way of training one kind of model, as one rank sees it."""

    @property
    def model_record(self) -> ModelRecord:
        """The model's kind, family and configuration, kept in checkpoints."""

    def migrated(self, record: ModelRecord) -> Mapping[str, Any]:
        """Returns the configuration of a checkpoint's record, as `model_record` would hold it now.

        Raises:
            ValueError: a model of another kind, or a version that is not known here.
        """

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The pipeline stages that this rank holds, in the order of the forward pass."""

    def units(self, stage: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules of a stage that are worth gathering one at a time: its blocks."""

    @property
    def losses(self) -> Sequence[str]:
        """Names of the losses."""

    @property
    def reported(self) -> Sequence[str]:
        """Names of sums that are reported beside the losses, such as an accuracy.

        `denominators` and `loss` give them too. They have no gradient, and a value that is not
        finite does not end or skip a step.
        """

    @property
    def auxiliary_losses(self) -> Sequence[str]:
        """Names of the losses that layers have of their own (`megatron_parallel.AuxiliaryLosses`).

        In a training step, stages are called with the keyword argument ``auxiliary_losses``, an
        object to which a layer attaches its losses. It names there the axes whose ranks all have
        the same value.
        """

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Returns what each loss and each reported sum is divided by, from labels and masks alone.

        Auxiliary losses are among them.

        Called with the micro-batches of this rank before the first forward pass of a step, and
        summed over the ranks, so that no gradient is ever an average of averages.
        """

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """Returns what this rank computes of a micro-batch of its data-parallel rank.

        Asked for with context parallelism only, where it is a part of every sequence, and in a pool
        (`megatron_train.document_pool`), where it is a part of a row. `inputs`,
        `stage_output_spec` and `loss` are called with what is returned, whose ``split`` says which
        places each rank has.
        """

    def inputs(self, batch: MicroBatch, stage: int, iteration: int | None) -> Mapping[str, Any]:
        """Returns the keyword arguments of a stage for a micro-batch.

        What the stage before passes on comes as its first positional argument. ``iteration`` is the
        number of the step, or None in an evaluation.
        """

    def stage_output_spec(
        self, batch: MicroBatch, stage: int
    ) -> TensorSpec | tuple[TensorSpec, ...]:
        """Return shape and dtype of what a stage passes on; asked of every rank for every stage."""

    def loss(self, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        """Return each loss and each reported sum of a micro-batch, from the last stage's output."""

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the operations of a forward and backward pass of the whole model."""


@runtime_checkable
class PreparingTask(Protocol):
    """A task whose micro-batches need more than samples: a teacher, a reference, rollouts."""

    def prepare(self, batches: Sequence[MicroBatch], iteration: int | None) -> Sequence[MicroBatch]:
        """Returns the micro-batches of a step with what the task computes for them itself.

        Called without gradients on every rank, with this rank's micro-batches, before
        `Task.denominators`. All ranks of a step call it together, so it may communicate. It may
        return other micro-batches, as many on every data-parallel rank.

        Args:
            batches: as they were read.
            iteration: number of the step, or None in an evaluation.
        """
