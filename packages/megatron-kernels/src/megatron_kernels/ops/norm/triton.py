"""Norms by our Triton kernels, alone or after the addition of a residual stream."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.triton_op import TritonOp

_MODULES: Final = ("megatron_kernels.triton_kernels.norm", "megatron_kernels.ops.norm.triton")
_FORWARD: Final = TritonOp(
    "norm_forward(Tensor x, Tensor? added, Tensor? weight, Tensor? bias, float eps, "
    "bool zero_centered, bool centers) -> (Tensor, Tensor, Tensor, Tensor)",
    *_MODULES,
)
_BACKWARD: Final = TritonOp(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor mean, Tensor scale, "
    "bool zero_centered, bool centers, bool has_bias) -> (Tensor, Tensor, Tensor)",
    *_MODULES,
)


def norm_forward_fake(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool,
    centers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the outputs of `norm_forward` without values."""
    statistics = torch.promote_types(x.dtype, torch.float32)
    total = x.new_empty(0 if added is None else x.shape)
    mean = x.new_empty(x.shape[:-1] if centers else (0,), dtype=statistics)
    return total, x.new_empty(x.shape), mean, x.new_empty(x.shape[:-1], dtype=statistics)


def norm_backward_fake(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    zero_centered: bool,
    centers: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs of `norm_backward` without values."""
    dtype = x.dtype if weight is None else weight.dtype
    of_weight = x.new_empty(x.shape[-1:] if weight is not None else (0,), dtype=dtype)
    of_bias = x.new_empty(x.shape[-1:] if has_bias else (0,), dtype=dtype)
    return x.new_empty(x.shape), of_weight, of_bias


class _Norm(Function):
    """Inputs: stream, what is added to it or None, gain, bias, and the options of the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: tuple[float, bool, bool],
        returns_sum: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        eps, *kinds = options
        x = x if _has_rows(x) else x.contiguous()
        added, weight, bias = (
            None if each is None else each.contiguous() for each in (added, weight, bias)
        )
        total, y, mean, scale = _FORWARD(x, added, weight, bias, eps, *kinds)
        ctx.save_for_backward(x if added is None else total, weight, mean, scale)
        ctx.adds, ctx.has_bias, ctx.kinds = added is not None, bias is not None, kinds
        ctx.returns_sum = returns_sum
        ctx.set_materialize_grads(False)
        if not returns_sum:
            normed: Tensor = y
            return normed
        return x.view_as(x) if added is None else total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dsum, dy = grads if ctx.returns_sum else (None, grads[0])
        if dy is None:
            return dsum, dsum if ctx.adds else None, None, None, None, None
        dsum = None if dsum is None else dsum.contiguous()
        dx, of_weight, of_bias = _BACKWARD(
            dy.contiguous(), dsum, x, weight, mean, scale, *ctx.kinds, ctx.has_bias
        )
        return (
            dx,
            dx if ctx.adds else None,
            None if weight is None else of_weight,
            of_bias if ctx.has_bias else None,
            None,
            None,
        )


def _has_rows(x: Tensor) -> bool:
    """Returns whether rows are contiguous and at equal distances, as the keys of a projection."""
    if x.dim() < 2 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return False
    expected = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Computes RMSNorm in one kernel each way; saves the input and one number for each row."""
    y: Tensor = _Norm.apply(x, None, weight, None, (eps, zero_centered, False), False)  # type: ignore[no-untyped-call]
    return y


def rms_norm_unsupported_reason(x: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(x, weight, row=x.shape[-1])


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Computes LayerNorm in one kernel each way; saves the input and two numbers for each row."""
    y: Tensor = _Norm.apply(x, None, weight, bias, (eps, zero_centered, True), False)  # type: ignore[no-untyped-call]
    return y


def layer_norm_unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return triton_op.unsupported_reason(x, weight, bias, row=x.shape[-1])


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Computes the sum and its RMSNorm in one kernel each way; saves the sum."""
    found: tuple[Tensor, Tensor] = _Norm.apply(
        x, added, weight, None, (eps, zero_centered, False), True
    )  # type: ignore[no-untyped-call]
    return found


def add_rms_norm_unsupported_reason(
    x: Tensor, added: Tensor | None, weight: Tensor | None, *_: Any
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    return _adding_reason(x, added) or triton_op.unsupported_reason(x, weight, row=x.shape[-1])


def add_layer_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the sum and its LayerNorm in one kernel each way; saves the sum."""
    found: tuple[Tensor, Tensor] = _Norm.apply(
        x, added, weight, bias, (eps, zero_centered, True), True
    )  # type: ignore[no-untyped-call]
    return found


def add_layer_norm_unsupported_reason(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, *_: Any
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    reason = triton_op.unsupported_reason(x, weight, bias, row=x.shape[-1])
    return _adding_reason(x, added) or reason


def _adding_reason(x: Tensor, added: Tensor | None) -> str | None:
    if added is None or x.dtype == added.dtype:
        return None
    return f"x is {x.dtype} and what is added {added.dtype}; they must agree"
