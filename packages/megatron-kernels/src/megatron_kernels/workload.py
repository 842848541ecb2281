"""The description of one call of an operation at the size of a model, and the work it cannot avoid.

A layer of a model with 64 channels a head, as in training: `tokens` of one sequence, `width` of the
residual stream, four times as wide feed-forward layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor

from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops.low_precision.quantize import Quantized
from megatron_kernels.registry import Op

HEAD: Final = 64
"""Channels of a head."""

EXPERTS: Final = 8
"""Experts of a layer, of which each token chooses two."""

WorkSize = Literal["small", "medium", "large"]
BACKWARD: Final = 2.0
"""Products of the backward pass for one of the forward pass."""

RECOMPUTED: Final = 2.5
"""The same for attention, which computes its scores again."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer.

    Attributes:
        tokens: Length of the sequence.
        width: Width of the residual stream.
        vocabulary: Number of logits of a token.
    """

    tokens: int
    width: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.width // HEAD


SHAPES: Final[dict[WorkSize, Shape]] = {
    "small": Shape(256, 512, 2_048),
    "medium": Shape(1_024, 1_024, 8_192),
    "large": Shape(8_192, 4_096, 32_768),
}
"""Sizes by name: one for tests, one for a CPU, one for a GPU."""


@dataclass(frozen=True)
class Workload:
    """One call of an operation at the size of a model.

    Attributes:
        op: The operation.
        label: What is special about the call.
        arguments: Makes its arguments.
        products: Floating-point operations of matrix products in the forward pass. 0 for an
            operation that is bound by memory.
        backward: Products of the backward pass for one of the forward pass.
    """

    op: Op[Any, Any]
    label: str
    arguments: Callable[[InputGenerator, Shape], tuple[Any, ...]]
    products: Callable[[Shape], float] = lambda _: 0.0
    backward: float = BACKWARD

    @property
    def title(self) -> str:
        """Operation and label."""
        return f"{self.op.name}, {self.label}" if self.label else self.op.name


def least_bytes(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Returns the bytes that a forward pass must move, and both passes together.

    The forward pass reads its inputs and writes its outputs. The backward pass reads the inputs and
    the gradients of the outputs, and writes the gradients of the inputs.
    """
    inputs = [tensor for argument in arguments for tensor in _tensors(argument)]
    read = sum(a.numel() * a.element_size() for a in inputs)
    written = sum(y.numel() * y.element_size() for y in outputs)
    gradients = sum(a.numel() * a.element_size() for a in inputs if a.requires_grad)
    return read + written, 2 * (read + written) + gradients


def _tensors(argument: Any) -> tuple[Tensor, ...]:
    if isinstance(argument, Quantized):
        return argument.elements, argument.scales
    return (argument,) if isinstance(argument, Tensor) else ()
