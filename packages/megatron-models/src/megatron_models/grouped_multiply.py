"""The multiplication of rows that are sorted by expert, as experts pass it to their products."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class GroupedMultiply:
    """Multiplies each row by the matrix of its expert; a `Multiply` of one layer and micro-batch.

    A product that does not multiply by it itself reads its fields.

    Attributes:
        counts: Rows of each expert on this rank, `[e]`.
        has_tail: Whether rows of no expert may follow.
        grouped_matmul: `megatron_kernels.grouped_matmul` with its backend.
    """

    counts: Int[Tensor, " e"]
    has_tail: bool
    grouped_matmul: Callable[[Tensor, Tensor, Tensor, bool], Tensor]

    def __call__(
        self, x: Float[Tensor, "m i"], weight: Float[Tensor, "e *out i"], bias: Tensor | None = None
    ) -> Float[Tensor, "m flat"]:
        """Returns the product of each row, with the outputs in one dim; adds no bias."""
        del bias
        matrices = weight.flatten(1, -2).transpose(1, 2)
        return self.grouped_matmul(x, matrices, self.counts, self.has_tail)
