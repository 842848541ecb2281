"""The contract between the trainer and what it trains.

The trainer never asks which model it trains, nor on how many ranks. It divides sums by
denominators, and both come from here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from megatron_ckpt import ModelRecord
from megatron_parallel import Passed
from torch import Tensor, nn

Batch: TypeAlias = Mapping[str, Tensor]
"""One micro-batch: tensors of shape ``[b, s]`` or ``[b]`` by name."""


class Task(Protocol):
    """One way of training one kind of model, as one rank sees it."""

    @property
    def model_record(self) -> ModelRecord:
        """The model's kind, family and configuration, kept in checkpoints."""

    def migrated(self, record: ModelRecord) -> Mapping[str, Any]:
        """Return the configuration of a checkpoint's record, as `model_record` would hold it now.

        Raises:
            ValueError: a model of another kind, or a version that is not known here.
        """

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The pipeline stages that this rank holds, in the order of the forward pass."""

    def units(self, stage: nn.Module) -> Sequence[nn.Module]:
        """Return the modules of a stage that are worth gathering one at a time: its blocks."""

    @property
    def losses(self) -> Sequence[str]:
        """Names of the losses."""

    @property
    def inner_losses(self) -> Sequence[str]:
        """Names of the losses that layers have of their own (`megatron_parallel.InnerLosses`).

        In a training step, stages are called with the keyword argument ``inner``, which takes them;
        a layer names there the axes whose ranks all have the same value.
        """

    def denominators(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return what each loss, inner ones too, is divided by, from labels and masks alone.

        Called with the micro-batches of this rank before the first forward pass of a step, and
        summed over the ranks, so that no gradient is ever an average of averages.
        """

    def cut(self, batch: Batch) -> Batch:
        """Return what this rank computes of a micro-batch of its data-parallel rank.

        Asked for with context parallelism only, where it is a part of every sequence, and in a pool
        (`megatron_train.document_pool`), where it is a part of a row. `inputs`, `passed` and `loss`
        are called with what is returned.
        """

    def inputs(self, batch: Batch, stage: int, iteration: int | None) -> Mapping[str, Any]:
        """Return the keyword arguments of a stage for a micro-batch.

        What the stage before passes on comes as its first positional argument. ``iteration`` is the
        number of the step, or None in an evaluation.
        """

    def passed(self, batch: Batch, stage: int) -> Passed | tuple[Passed, ...]:
        """Return shape and dtype of what a stage passes on; asked of every rank for every stage."""

    def loss(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Return each loss of a micro-batch as a sum, from the output of the last stage."""

    def flops(self, batches: Sequence[Batch]) -> float:
        """Return the operations of a forward and backward pass of the whole model."""
