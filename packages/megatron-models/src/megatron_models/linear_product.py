"""The product of linear layers by a backend of `megatron_kernels.linear`."""

from dataclasses import dataclass

from megatron_kernels import linear
from megatron_parallel.tensor_parallel.product import (
    Multiply,
    PlainProduct,
    Weights,
    as_matrix,
    multiply_matrix,
)
from torch import Tensor


@dataclass(frozen=True)
class LinearProduct(PlainProduct):
    """The product `x W^T + b` by a named backend, for all layers but experts.

    Attributes:
        backend: Name of a backend of `megatron_kernels.linear`.
    """

    backend: str

    def forward(
        self,
        x: Tensor,
        weights: Weights,
        bias: Tensor | None = None,
        multiply: Multiply = multiply_matrix,
    ) -> Tensor:
        """Returns `x W^T + b`. The gradients are those of the plain product."""
        del multiply
        return linear(x, as_matrix(weights[0]), bias, backend=self.backend)
