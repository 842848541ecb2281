"""A tensor in FP8 with one scale, for products along both of its last dims.

    both = quantize_tensor(x)
    rows, columns = both.rows, both.columns      # [m, k] and [k, m], the same elements

The elements of a matrix and of its transpose are equal if all share one scale, so a linear layer
casts each operand once. Matrix units before compute capability 10 want the dim over which a product
sums adjacent in memory, so the transpose is a copy, of one byte an element.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.low_precision import triton
from megatron_kernels.ops.low_precision.elements import DTYPES, to_elements
from megatron_kernels.ops.low_precision.formats import (
    LARGEST,
    ElementType,
    QuantFormat,
    ScaleType,
)
from megatron_kernels.ops.low_precision.quantize import scales_of_blocks
from megatron_kernels.ops.low_precision.tensor_elements import TensorElements
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op

_NONE = 0
"""Number of elements of a result that was not asked for."""


def _own_scale(amax: Tensor, elements: ElementType, rule: ScaleType) -> Tensor:
    """Returns the scale of a tensor with this largest magnitude, a scalar."""
    return scales_of_blocks(amax.view(1, 1), QuantFormat(elements, scale=rule))[0].view(())


def _scale(
    amax: Tensor, elements: ElementType, rule: ScaleType, given: Tensor | None, measures: bool
) -> Tensor:
    """Returns the given scale if it is positive, else the tensor's own."""
    if given is None:
        return _own_scale(amax, elements, rule)
    given = given.to(amax.dtype).view(())
    if not measures:
        return given
    return torch.where(given > 0, given, _own_scale(amax, elements, rule))


def reference(
    x: Tensor,
    elements: ElementType,
    rule: ScaleType,
    given: Tensor | None,
    rows: bool,
    columns: bool,
    measures: bool,
) -> TensorElements:
    """Computes the definition, in float32 or float64."""
    numbers = upcast(x)
    amax = numbers.new_zeros(()) if not x.numel() else numbers.abs().amax()
    scale = _scale(amax, elements, rule, given, measures)
    finite = numbers.masked_fill(numbers.isinf(), torch.nan)
    found = to_elements(finite / scale, elements)
    empty = found.new_empty(_NONE)
    return TensorElements(
        found if rows else empty,
        found.mT.contiguous() if columns else empty,
        scale,
        amax if measures else amax.new_empty(_NONE),
    )


def few_passes(
    x: Tensor,
    elements: ElementType,
    rule: ScaleType,
    given: Tensor | None,
    rows: bool,
    columns: bool,
    measures: bool,
) -> TensorElements:
    """Reads the tensor once for the magnitude and once for the cast, without a copy in float32."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    ordered = x.t() if x.dim() == 2 and x.stride(0) == 1 else x  # in the order of memory
    if not measures:
        amax = x.new_empty(_NONE, dtype=exact)
    elif x.numel():
        amax = torch.linalg.vector_norm(ordered, torch.inf).to(exact)
    else:
        amax = x.new_zeros((), dtype=exact)
    scale = _scale(amax, elements, rule, given, measures)
    # Of the same number of dims, so that a scale in float32 makes the quotient one.
    quotient = ordered / scale.view((1,) * x.dim())
    if given is not None:  # it may be too small, and then an infinity must not become finite
        largest = LARGEST[elements]
        quotient = quotient.clamp_(-largest, largest).masked_fill_(ordered.isinf(), torch.nan)
    found = quotient.to(DTYPES[elements])
    found = found if ordered is x else found.t()
    empty = found.new_empty(_NONE)
    return TensorElements(
        _adjacent(found, x) if rows else empty,
        _adjacent(found.mT, x) if columns else empty,
        scale,
        amax,
    )


def _adjacent(elements: Tensor, x: Tensor) -> Tensor:
    """Returns elements with the last dim adjacent in memory, where products need it: on GPUs."""
    return elements if x.device.type == "cpu" else elements.contiguous()


@op(
    triton_backend(
        triton.quantize_tensor,
        triton.unsupported_reason,
        "our kernels: one read for the magnitude, one for both casts",
        NEVER_RUN,
    ),
    Backend("torch", few_passes, accept_all, "torch operations, without copies in float32"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def quantize_tensor(
    x: Float[Tensor, "*batch m k"],
    elements: ElementType = "e4m3",
    rule: ScaleType = "float32",
    scale: Float[Tensor, ""] | None = None,
    rows: bool = True,
    columns: bool = True,
    measures: bool = True,
    *,
    backend: str = AUTO,
) -> TensorElements:
    """Casts a tensor to FP8 with one scale. Has no gradient.

    The result is that of `quantize` with the same scale, and of `quantize` of the transpose.

    Args:
        x: Matrix `[m, k]`, or several that share the scale.
        elements: "e4m3" or "e5m2".
        rule: How the tensor's own scale is chosen, "float32" or "power_of_two".
        scale: Factor of all elements, taken if it is greater than 0; magnitudes above its range are
            clipped, and infinities become NaN. Defaults to the tensor's own, which clips nothing.
        rows: Whether `TensorElements.rows` is wanted.
        columns: Whether `TensorElements.columns` is wanted.
        measures: Whether `TensorElements.amax` is wanted. Without it the scale must be given, and
            the tensor is read once.
        backend: "auto" or the name of one backend.

    Raises:
        KernelError: Elements or rule are others, or neither a scale nor a magnitude is there.
    """
    if elements not in ("e4m3", "e5m2") or rule not in ("float32", "power_of_two"):
        raise KernelError(
            f"quantize_tensor casts to e4m3 or e5m2 by the rule float32 or power_of_two, not to "
            f"{elements} by {rule}; use quantize"
        )
    if scale is None and not measures:
        raise KernelError("quantize_tensor needs a scale or measures=True")
    return quantize_tensor.run(backend, x, elements, rule, scale, rows, columns, measures)
