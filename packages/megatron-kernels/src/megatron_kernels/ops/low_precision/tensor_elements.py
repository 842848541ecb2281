"""The elements of a tensor in FP8 with one scale, for products along both of its last dims."""

from typing import NamedTuple

from torch import Tensor

from megatron_kernels.ops.low_precision.formats import QuantFormat
from megatron_kernels.ops.low_precision.quantize import Quantized


class TensorElements(NamedTuple):
    """A tensor in FP8 with one scale.

    Attributes:
        rows: Elements `[..., m, k]`; without elements if they were not asked for.
        columns: The same as `[..., k, m]`, contiguous on a GPU.
        scale: The factor of all elements, a scalar in float32 (float64 if the tensor was).
        amax: The largest magnitude, NaN if there is one; without elements if it was not asked for.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor
    amax: Tensor

    def of_rows(self, form: QuantFormat) -> Quantized:
        """Returns the matrix for products that sum over columns."""
        return of_tensor(self.rows, self.scale, form)

    def of_columns(self, form: QuantFormat) -> Quantized:
        """Returns the transposed matrix, for products that sum over rows."""
        return of_tensor(self.columns, self.scale, form)


def of_tensor(elements: Tensor, scale: Tensor, form: QuantFormat) -> Quantized:
    """Returns elements with one scale as a quantized matrix.

    Args:
        elements: Elements `[m, k]`.
        scale: The factor of all elements, a scalar.
        form: The format, with one scale.
    """
    m, k = elements.shape
    return Quantized(elements, scale.view(1, 1), form, (m, k))
