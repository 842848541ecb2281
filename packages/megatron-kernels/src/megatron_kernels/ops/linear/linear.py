"""The product of rows and a weight matrix."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_kernels.ops import batch_invariant, invariant_product
from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op
from megatron_kernels.transformer_engine import products as transformer_engine
from megatron_kernels.transformer_engine.library import NAME as TRANSFORMER_ENGINE


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the definition, in at least float32."""
    y = upcast(x) @ upcast(weight).t()
    return (y if bias is None else y + upcast(bias)).to(x.dtype)


def fused(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Calls `F.linear`."""
    return functional.linear(x, weight, bias)


def invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes tiles whose rows have the same bits; the backward pass is that of `F.linear`."""
    if not torch.is_grad_enabled():
        return _in_tiles(x, weight, bias)
    y: Tensor = _Tiled.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = invariant_product.multiply_in_tiles(rows, weight, bias)
    return y.view(*x.shape[:-1], len(weight))


class _Tiled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _in_tiles(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, weight.shape[0])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            (dy @ weight).view(x.shape) if of_x else None,
            dy.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            dy.sum(0) if of_bias else None,
        )


def dtypes_unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Returns that dtypes differ."""
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        return None
    shift = "" if bias is None else f", bias {bias.dtype}"
    return f"x is {x.dtype}, weight {weight.dtype}{shift}; they must agree"


@op(
    Backend("torch", fused, dtypes_unsupported_reason, "F.linear"),
    Backend(
        TRANSFORMER_ENGINE,
        transformer_engine.linear,
        transformer_engine.linear_unsupported_reason,
        "Transformer Engine's general_gemm",
        NEVER_RUN,
    ),
    Backend(
        batch_invariant.NAME,
        invariant,
        dtypes_unsupported_reason,
        f"torch.mm of up to {invariant_product.SIZES[-1]} rows at a time",
        on_request=batch_invariant.SLOWER,
    ),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def linear(
    x: Float[Tensor, "*rows k"],
    weight: Float[Tensor, "out k"],
    bias: Float[Tensor, " out"] | None = None,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows out"]:
    """Computes `x W^T + b`.

    Args:
        x: Input `[..., k]`.
        weight: Weight `[out, k]`.
        bias: Bias `[out]`. Defaults to none.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., out]` in the dtype of `x`.
    """
    return linear.run(backend, x, weight, bias)
