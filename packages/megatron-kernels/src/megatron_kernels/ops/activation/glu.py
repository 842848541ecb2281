"""Gated linear units with any gate (Shazeer, 2020), on a fused gate-and-up projection.

`megatron_kernels.swiglu` is the case of SiLU without bounds.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_kernels.ops.activation import batch_invariant, triton
from megatron_kernels.ops.activation.gelu import reference as gelu_reference
from megatron_kernels.ops.activation.pointwise import QUICK
from megatron_kernels.ops.activation.pointwise import reference as pointwise_reference
from megatron_kernels.ops.batch_invariant import NAME, SLOWER, with_gradients_of
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op

Gate = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]


def reference(x: Tensor, gate: Gate, bound: float, offset: float) -> Tensor:
    """Computes the definition, in at least float32."""
    values = upcast(x)
    g, up = values[..., 0, :], values[..., 1, :]
    if bound:
        g = torch.where(g > bound, bound, g)
        up = torch.where(up.abs() > bound, bound * up.sign(), up)
    if gate == "gelu" or gate == "gelu_tanh":
        active = gelu_reference(g, "tanh" if gate == "gelu_tanh" else "none")
    else:
        active = pointwise_reference(g, gate)
    return (active * (up + offset)).to(x.dtype)


def fused(x: Tensor, gate: Gate, bound: float, offset: float) -> Tensor:
    """Computes the product and saves only `x`; the backward pass computes the gate again."""
    result: Tensor = _GLU.apply(x, gate, bound, offset)  # type: ignore[no-untyped-call]
    return result


class _GLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate, bound: float, offset: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = gate, bound, offset
        g, up = _bounded(x, bound)
        return _activate(g, gate) * (up + offset if offset else up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        gate, bound, offset = ctx.options
        g, up = _bounded(x, bound)
        up = up + offset if offset else up
        if torch.compiler.is_compiling() and gate == "silu":
            dx = _gradient_of_silu(grads[0], g, up)
        elif torch.compiler.is_compiling():  # it fuses, and refuses `out` that is not contiguous
            dg = _backward(grads[0] * up, g, gate)
            dup = grads[0] * _activate(g, gate)
            dx = torch.stack((dg, dup), -2)
        else:
            dx = torch.empty_like(x)
            dg, dup = dx[..., 0, :], dx[..., 1, :]
            _backward(torch.mul(grads[0], up, out=dg), g, gate, out=dg)
            torch.mul(grads[0], _activate(g, gate), out=dup)
        if bound:  # no gradient beyond a bound
            beyond = torch.stack((x[..., 0, :] > bound, x[..., 1, :].abs() > bound), -2)
            dx = dx.masked_fill(beyond, 0.0)
        return dx, None, None, None


def _gradient_of_silu(dy: Tensor, g: Tensor, up: Tensor) -> Tensor:
    """Returns the gradient of `silu(g) * up` for code that fuses it, with one exponential.

    `silu_backward` and `silu` would compute one each, and exponentials bound the fused loop.
    """
    dy, gate, factor = (upcast(each) for each in (dy, g, up))
    sigmoid = torch.sigmoid(gate)
    active = gate * sigmoid
    parts = dy * factor * (sigmoid + active * (1.0 - sigmoid)), dy * active
    # Rounded before they are stacked: where casts to FP8 follow, Inductor would drop the rounding
    # of the stack and store it in float32.
    return torch.stack([part.to(g.dtype) for part in parts], -2)


def _bounded(x: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    g, up = x[..., 0, :], x[..., 1, :]
    return (g.clamp(max=bound), up.clamp(-bound, bound)) if bound else (g, up)


def _activate(g: Tensor, gate: Gate) -> Tensor:
    if gate == "silu":
        return functional.silu(g)
    if gate == "quick_gelu":
        return functional.silu(QUICK * g) * (1 / QUICK)
    if gate == "relu":
        return functional.relu(g)
    return functional.gelu(g, approximate="tanh" if gate == "gelu_tanh" else "none")


def _backward(grad: Tensor, g: Tensor, gate: Gate, out: Tensor | None = None) -> Tensor:
    """Returns the gradient of the gate's input, written to `out` if given."""
    ops = torch.ops.aten
    written = {} if out is None else {"grad_input": out}
    result: Tensor
    if gate == "silu":
        result = ops.silu_backward(grad, g, **written)
    elif gate == "quick_gelu":
        result = ops.silu_backward(grad, QUICK * g, **written)
    elif gate == "relu":
        result = ops.threshold_backward(grad, g, 0, **written)
    else:
        approximate = "tanh" if gate == "gelu_tanh" else "none"
        result = ops.gelu_backward(grad, g, approximate=approximate, **written)
    return result


def invariant(x: Tensor, gate: Gate, bound: float, offset: float) -> Tensor:
    """Computes the definition; the backward pass is that of the fused backend."""
    return with_gradients_of(fused, batch_invariant.glu, x, gate, bound, offset)


@op(
    triton_backend(triton.glu, triton.unsupported_reason, "one kernel of ours each way"),
    Backend("torch", fused, accept_all, "torch's functions, saves its input only"),
    Backend(NAME, invariant, accept_all, "the definition, rounded alike", on_request=SLOWER),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def glu(
    x: Float[Tensor, "*rows 2 f"],
    gate: Gate,
    bound: float = 0.0,
    offset: float = 0.0,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows f"]:
    """Computes activation(gate) * (up + offset).

    gpt-oss has quick GELU, a bound of 7 and an offset of 1.

    Args:
        x: `[..., 2, f]`: gate at index 0, up at index 1 of the second last dim.
        gate: Activation of the gate.
        bound: Maximum of the gate and of the magnitude of up, before both are used. 0: none. The
            gradient passes at the bound itself, as it does through `torch.clamp` up to torch 2.13,
            with which gpt-oss was written. Since 2.14 that of `torch.clamp` is 0 there.
        offset: Added to up.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., f]` in the dtype of `x`.
    """
    return glu.run(backend, x, gate, bound, offset)
