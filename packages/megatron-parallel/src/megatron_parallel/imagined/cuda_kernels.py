"""Kernels of a CUDA device that a torch without CUDA lacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_parallel._compat.imagined import device_type_of
from megatron_parallel.imagined.ledger import DeviceLedger

_ATEN: Final = torch.ops.aten
_ATTEND: Final = functional.scaled_dot_product_attention


@contextmanager
def cuda_kernels(ledger: DeviceLedger) -> Iterator[None]:
    """Runs functions on fake CUDA tensors as the kernels that torch has on a CUDA device.

    A torch without CUDA replaces them by several operations that keep and move more bytes:

    - `scaled_dot_product_attention`: flash attention for 16-bit inputs without a mask, else the
      memory-efficient kernel. Only the first takes grouped keys and values as they are; its
      backward pass sums gradients of each head of queries.
    - `rms_norm` and `silu`: one kernel for the forward and one for the backward pass.

    The functions of `torch.nn.functional` are replaced, since a mode of torch functions is not
    active in the threads of autograd, where activations are recomputed.

    Compiled code contains kernels of attention, and the other functions themselves.

    Args:
        ledger: Counts these kernels.
    """
    attend, rms_norm, silu = _ATTEND, functional.rms_norm, functional.silu

    def on_cuda_attend(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return _attend(None, q, *args, **kwargs) if q.is_cuda else attend(q, *args, **kwargs)
        if device_type_of(q) != "cuda":
            return attend(q, *args, **kwargs)
        return _attend(ledger, q, *args, **kwargs)

    def on_cuda_rms_norm(
        x: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling() or device_type_of(x) != "cuda":
            return rms_norm(x, normalized_shape, weight, eps)
        normal: Tensor = _RmsNorm.apply(x, weight, len(normalized_shape), ledger)  # type: ignore[no-untyped-call]
        return normal

    def on_cuda_silu(x: Tensor, inplace: bool = False) -> Tensor:
        if torch.compiler.is_compiling() or device_type_of(x) != "cuda":
            return silu(x, inplace)
        active: Tensor = _Silu.apply(x, ledger)  # type: ignore[no-untyped-call]
        return active

    with patch.multiple(
        functional,
        scaled_dot_product_attention=on_cuda_attend,
        rms_norm=on_cuda_rms_norm,
        silu=on_cuda_silu,
    ):
        yield


def _attend(
    ledger: DeviceLedger | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    out: Tensor
    repeats = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and q.shape[-1] == v.shape[-1]:
        if repeats > 1 and ledger is not None:
            k, v = (_Grouped.apply(t, repeats, ledger) for t in (k, v))  # type: ignore[no-untyped-call]
        out = _ATEN._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
        return out
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, dim=-3) for t in (k, v))
    if q.dtype == torch.float64:  # no fused kernel; asking for one needs CUDA's libraries
        out = _ATEN._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
        return out
    bias = None
    if attn_mask is not None:
        bias = torch.empty(attn_mask.shape, dtype=q.dtype, device=q.device)
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    saves = torch.is_grad_enabled()
    out = _ATEN._scaled_dot_product_efficient_attention(
        q, k, v, bias, saves, dropout_p, is_causal, scale=scale
    )[0]
    return out


class _Grouped(Function):
    """Identity of keys or values, whose backward pass sums gradients of the heads of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, repeats: int, ledger: DeviceLedger) -> Tensor:
        ctx.repeats, ctx.ledger = repeats, ledger
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        of_heads = grads[0].new_empty(ctx.repeats, *grads[0].shape)
        ctx.ledger.kernel("sum", (of_heads, grads[0]))
        return grads[0], None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, dims: int, ledger: DeviceLedger
    ) -> Tensor:
        out = torch.empty_like(x)
        scale = torch.empty(x.shape[:-dims], dtype=torch.float32, device=x.device)
        ledger.kernel("_fused_rms_norm", [t for t in (x, weight, out, scale) if t is not None])
        ctx.save_for_backward(x, weight, scale)
        ctx.ledger = ledger
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        of_x = torch.empty_like(x)
        of_weight = None if weight is None else torch.empty_like(weight)
        tensors = (grads[0], x, weight, scale, of_x, of_weight)
        ctx.ledger.kernel("_fused_rms_norm_backward", [t for t in tensors if t is not None])
        return of_x, of_weight, None, None


class _Silu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ledger: DeviceLedger) -> Tensor:
        out = torch.empty_like(x)
        ledger.kernel("silu", (x, out))
        ctx.save_for_backward(x)
        ctx.ledger = ledger
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        of_x = torch.empty_like(x)
        ctx.ledger.kernel("silu_backward", (grads[0], x, of_x))
        return of_x, None
