"""Activations and gated units, with a bias before them, one kernel each way.

The backward pass computes the activation again from its input.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import ELEMENTS, accumulator, elementwise_grid


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    if KIND == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    if KIND == "gelu":
        return x * (0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        return x * (0.5 + 0.5 * _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    positive = tl.where(x > 0.0, x, x * 0.0)  # NaN stays NaN
    return positive * positive if KIND == "squared_relu" else positive


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """Returns the derivative of the activation."""
    if KIND == "silu":
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    if KIND == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    if KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 + 0.5 * tl.math.erf(x * 0.7071067811865476) + x * density
    if KIND == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    if KIND == "squared_relu":
        return 2.0 * tl.where(x > 0.0, x, 0.0)
    return (x > 0.0).to(x.dtype)  # all branches return one dtype


@triton.jit
def _pointwise(
    X, BIAS, DY, OUT, f,
    KIND: tl.constexpr, BACKWARD: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(f, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    at = row * f + column
    x = tl.load(X + at, mask=inside).to(ACC)
    if HAS_BIAS:
        x += tl.load(BIAS + column, mask=inside).to(ACC)
    if BACKWARD:
        out = tl.load(DY + at, mask=inside).to(ACC) * _slope(x, KIND)
    else:
        out = _activate(x, KIND)
    tl.store(OUT + at, out, mask=inside)


@triton.jit
def _glu(
    X, BIAS, DY, OUT, f, bound, offset,
    KIND: tl.constexpr, BACKWARD: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(f, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    at = row * f + column
    first = 2 * row * f + column
    gate = tl.load(X + first, mask=inside).to(ACC)
    up = tl.load(X + first + f, mask=inside).to(ACC)
    if HAS_BIAS:
        gate += tl.load(BIAS + column, mask=inside).to(ACC)
        up += tl.load(BIAS + f + column, mask=inside).to(ACC)
    gate_beyond = gate > bound
    up_beyond = tl.abs(up) > bound
    if BOUNDED:
        gate = tl.where(gate_beyond, bound, gate)
        up = tl.where(up > bound, bound, tl.where(up < -bound, -bound, up))
    up += offset
    if BACKWARD:
        dy = tl.load(DY + at, mask=inside).to(ACC)
        of_gate = dy * up * _slope(gate, KIND)
        of_up = dy * _activate(gate, KIND)
        if BOUNDED:
            of_gate = tl.where(gate_beyond, 0.0, of_gate)
            of_up = tl.where(up_beyond, 0.0, of_up)
        tl.store(OUT + first, of_gate, mask=inside)
        tl.store(OUT + first + f, of_up, mask=inside)
    else:
        tl.store(OUT + at, _activate(gate, KIND) * up, mask=inside)


def activation_forward(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Returns the activation of `x + bias`."""
    return _run_pointwise(x, bias, None, kind)


def activation_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Returns the gradient of `x + bias`."""
    return _run_pointwise(x, bias, dy, kind)


def _run_pointwise(x: Tensor, bias: Tensor | None, dy: Tensor | None, kind: str) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        width = x.numel() if bias is None else bias.numel()
        _pointwise[elementwise_grid(x, width)](
            x, bias, dy, out, width,
            KIND=kind, BACKWARD=dy is not None, HAS_BIAS=bias is not None,
            ACC=accumulator(x.dtype), BLOCK=ELEMENTS,
        )  # fmt: skip
    return out


def glu_forward(x: Tensor, bias: Tensor | None, kind: str, bound: float, offset: float) -> Tensor:
    """Returns the gated unit of `x + bias`."""
    out = x.new_empty(*x.shape[:-2], x.shape[-1])
    _run_glu(x, bias, None, out, kind, bound, offset)
    return out


def glu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, bound: float, offset: float
) -> Tensor:
    """Returns the gradient of `x + bias`."""
    out = torch.empty_like(x)
    _run_glu(x, bias, dy, out, kind, bound, offset)
    return out


def _run_glu(
    x: Tensor,
    bias: Tensor | None,
    dy: Tensor | None,
    out: Tensor,
    kind: str,
    bound: float,
    offset: float,
) -> None:
    products = out if dy is None else dy
    if products.numel():
        _glu[elementwise_grid(products, x.shape[-1])](
            x, bias, dy, out, x.shape[-1], bound, offset,
            KIND=kind, BACKWARD=dy is not None, HAS_BIAS=bias is not None, BOUNDED=bound > 0,
            ACC=accumulator(x.dtype), BLOCK=ELEMENTS,
        )  # fmt: skip
