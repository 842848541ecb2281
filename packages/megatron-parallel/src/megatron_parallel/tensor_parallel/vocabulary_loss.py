"""Output layer and cross entropy as one operation, with or without all logits in memory.

    loss = layer(x, loss=partial(UNFUSED_CROSS_ENTROPY, targets=labels, true_vocab=v))    # [s, b]

`UNFUSED_CROSS_ENTROPY` computes the logits of all tokens and saves their probabilities for the
backward pass: tokens times this rank's part of the vocabulary. `LinearCrossEntropy` never makes
these.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from megatron_parallel.mesh.axes import Axis
from megatron_parallel.tensor_parallel.cross_entropy import (
    LogitsBlock,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.tensor_parallel.linear import column_parallel_linear
from megatron_parallel.tensor_parallel.product import Product, Weights


class OutputLayer(NamedTuple):
    """A column-parallel output layer, as argument of a loss.

    Attributes:
        weights: This rank's part of the weights, see `Weights`.
        axis: Axis that cuts the vocabulary.
        sequence_parallel: Whether the input is cut along dim 0.
        num_slices: As for `column_parallel_linear`.
        product: Product that the layer computes.
        bias: This rank's part of the bias of the logits, `[vocabulary / n]`. Defaults to none.
    """

    weights: Weights
    axis: Axis
    sequence_parallel: bool
    num_slices: int
    product: Product
    bias: Tensor | None = None


@runtime_checkable
class VocabularyLoss(Protocol):
    """The loss of each token as a function of the input of the output layer."""

    def __call__(
        self,
        x: Float[Tensor, "part b h"],
        layer: OutputLayer,
        *,
        targets: Int[Tensor, "s b"],
        true_vocab: int,
        label_smoothing: float = 0.0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "s b"]:
        """Returns the losses in nats, see `vocab_parallel_cross_entropy`.

        Args:
            x: Input of the output layer. With sequence parallelism, this rank's part of it.
            layer: The output layer.
            targets: Token ids, or `IGNORE_INDEX`.
            true_vocab: Size of the vocabulary without padding.
            label_smoothing: Part of the loss that all tokens share.
            softcap: Bound of the logits; 0 for none.
        """


@dataclass(frozen=True)
class LogitsCrossEntropy:
    """The losses, computed from the logits of all tokens.

    Attributes:
        block: Computes the part of each rank's columns, see `vocab_parallel_cross_entropy`.
            Defaults to operations of torch.
    """

    block: LogitsBlock | None = None

    def __call__(
        self,
        x: Float[Tensor, "part b h"],
        layer: OutputLayer,
        *,
        targets: Int[Tensor, "s b"],
        true_vocab: int,
        label_smoothing: float = 0.0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "s b"]:
        """Returns the losses in nats."""
        weight, *added_weights = layer.weights
        options = layer.axis, layer.sequence_parallel, layer.num_slices, layer.product
        logits = column_parallel_linear(x, weight, layer.bias, *options, tuple(added_weights))
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            layer.axis,
            true_vocab,
            label_smoothing=label_smoothing,
            softcap=softcap,
            overwrites=True,  # no other code holds the logits
            block=self.block,
        )


UNFUSED_CROSS_ENTROPY: Final[VocabularyLoss] = LogitsCrossEntropy()
"""The default loss."""
