"""Operands in few bits for products along both of their dims, as tensors that can be saved.

| operand | rows, summed over columns | columns, summed over rows |
|---|---|---|
| input `[tokens, in]` | the product | gradient of the weight |
| weight `[out, in]` | the product | gradient of the input |
| gradient `[tokens, out]` | gradient of the input | gradient of the weight |
"""

from typing import NamedTuple

from megatron_kernels import QuantFormat, Quantized
from torch import Tensor

PARTS = 3
"""Tensors of a quantized matrix: elements, scales and the scale of all of them."""


class BothWays(NamedTuple):
    """An operand for products along its dims.

    Attributes:
        rows: The matrix, or None if it was not asked for.
        columns: The transposed matrix, or None if it was not asked for.
        amax: The largest magnitude, if the format has one scale. None otherwise.
    """

    rows: Quantized | None
    columns: Quantized | None
    amax: Tensor | None

    def pack(self) -> tuple[Tensor | None, ...]:
        """Returns both matrices and the magnitude as tensors."""
        return (*pack(self.rows), *pack(self.columns), self.amax)


def pack(quantized: Quantized | None) -> tuple[Tensor | None, ...]:
    """Returns a matrix as `PARTS` tensors."""
    if quantized is None:
        return (None,) * PARTS
    return quantized.elements, quantized.scales, quantized.tensor_scale


def unpack(parts: tuple[Tensor | None, ...], form: QuantFormat, columns: int) -> Quantized:
    """Returns the matrix of the tensors of `pack`.

    Args:
        parts: The tensors.
        form: The format of the matrix.
        columns: Number of columns, which elements of less than a byte do not say.
    """
    elements, scales, scale = parts
    if elements is None or scales is None:
        raise TypeError("the operand was not converted for this product")
    return Quantized(elements, scales, form, (len(elements), columns), scale)
