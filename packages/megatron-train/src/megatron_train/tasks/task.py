"""The contract between the trainer and what it trains.

The trainer never asks which model it trains. It divides sums by denominators, and both come from
here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

Batch: TypeAlias = Mapping[str, Tensor]
"""One micro-batch: tensors of shape ``[b, s]`` by name."""


class Task(Protocol):
    """One way of training one kind of model."""

    @property
    def family(self) -> str | None:
        """Name of the model's family, kept in checkpoints; None if it has none."""

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's configuration as plain values, kept in checkpoints."""

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The parts of the model that this rank holds, in the order of the forward pass."""

    def denominators(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return what each loss is divided by, from the labels and masks of a whole step.

        Called before the first forward pass of the step, so that no gradient is ever an average of
        averages.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Run the stages on a micro-batch and return what `loss` needs of it."""

    def loss(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return each loss of a micro-batch as a sum, from the output of `forward`."""

    def flops(self, batches: Sequence[Batch]) -> float:
        """Return the operations of a forward and backward pass over the batches."""
