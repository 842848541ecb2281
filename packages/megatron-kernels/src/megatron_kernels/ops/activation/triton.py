"""Activations and gated units by our Triton kernels, with or without a bias before them."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

_MODULES: Final = (
    "megatron_kernels.triton_kernels.activation",
    "megatron_kernels.ops.activation.triton",
)
_FORWARD: Final = TritonOp(
    "activation_forward(Tensor x, Tensor? bias, str kind) -> Tensor", *_MODULES
)
_BACKWARD: Final = TritonOp(
    "activation_backward(Tensor dy, Tensor x, Tensor? bias, str kind) -> Tensor", *_MODULES
)
_GLU_FORWARD: Final = TritonOp(
    "glu_forward(Tensor x, Tensor? bias, str kind, float bound, float offset) -> Tensor", *_MODULES
)
_GLU_BACKWARD: Final = TritonOp(
    "glu_backward(Tensor dy, Tensor x, Tensor? bias, str kind, float bound, float offset) "
    "-> Tensor",
    *_MODULES,
)


def activation_forward_fake(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Returns the output of `activation_forward` without values."""
    return torch.empty_like(x)


def activation_backward_fake(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Returns the output of `activation_backward` without values."""
    return torch.empty_like(x)


def glu_forward_fake(
    x: Tensor, bias: Tensor | None, kind: str, bound: float, offset: float
) -> Tensor:
    """Returns the output of `glu_forward` without values."""
    return x.new_empty(*x.shape[:-2], x.shape[-1])


def glu_backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, bound: float, offset: float
) -> Tensor:
    """Returns the output of `glu_backward` without values."""
    return torch.empty_like(x)


class _Activation(Function):
    """An activation or a gated unit; saves its input and the bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, gated: bool, options: tuple[Any, ...]
    ) -> Tensor:
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.gated, ctx.options = gated, options
        y: Tensor = (_GLU_FORWARD if gated else _FORWARD)(x, bias, *options)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        run = _GLU_BACKWARD if ctx.gated else _BACKWARD
        dx = run(grads[0].contiguous(), x, bias, *ctx.options)
        of_bias = None
        if bias is not None and ctx.needs_input_grad[1]:
            of_bias = dx.reshape(-1, *bias.shape).sum(0).to(bias.dtype)
        return dx, of_bias, None, None


def _run(x: Tensor, bias: Tensor | None, gated: bool, *options: Any) -> Tensor:
    y: Tensor = _Activation.apply(x, bias, gated, options)  # type: ignore[no-untyped-call]
    return y


def unsupported_reason(x: Tensor, *_: Any) -> str | None:
    """Returns why the kernels do not support `x`."""
    return triton_op.unsupported_reason(x)


def bias_unsupported_reason(x: Tensor, bias: Tensor, *_: Any) -> str | None:
    """Returns why the kernels do not support `x` and the bias."""
    return triton_op.unsupported_reason(x, bias)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Computes GELU in one kernel each way."""
    return _run(x, None, False, gelu_kind(approximate))


def bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Computes GELU of `x + bias` in one kernel each way."""
    return _run(x, bias, False, gelu_kind(approximate))


def pointwise(x: Tensor, kind: str) -> Tensor:
    """Computes an activation of one input in one kernel each way."""
    return _run(x, None, False, kind)


def glu(x: Tensor, gate: str, bound: float, offset: float) -> Tensor:
    """Computes a gated unit in one kernel each way."""
    return _run(x, None, True, gate, bound, offset)


def swiglu(x: Tensor) -> Tensor:
    """Computes SwiGLU in one kernel each way."""
    return _run(x, None, True, "silu", 0.0, 0.0)


def bias_swiglu(x: Tensor, bias: Tensor) -> Tensor:
    """Computes SwiGLU of `x + bias` in one kernel each way."""
    return _run(x, bias, True, "silu", 0.0, 0.0)


def gelu_kind(approximate: str) -> str:
    """Returns the name of GELU among the activations of the kernels."""
    return "gelu_tanh" if approximate == "tanh" else "gelu"
