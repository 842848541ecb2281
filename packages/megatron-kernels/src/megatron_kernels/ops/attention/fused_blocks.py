"""Blocks of attention with the fused kernels behind `scaled_dot_product_attention`.

The public function does not return the log-sum-exp, and its backward pass belongs to autograd. The
kernels behind it return and take the log-sum-exp as they are.

| device | kernel | mask tensor | heads in groups |
|---|---|---|---|
| CPU | flash attention | yes | yes |
| CUDA, float16 and bfloat16 without a mask tensor | flash attention | no | repeated |
| CUDA, otherwise | memory-efficient attention | yes | repeated |

All views are `[b, n, s, d]`, the log-sum-exp is `[b, n, s]`.
"""

import math

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from megatron_kernels._compat import missing_gpu_reason
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.short_halves import adjacent, gradients

_ROWS = 32  # the memory-efficient kernel pads its log-sum-exp to a multiple of these
_ALIGNMENT = 8  # elements, of heads in the flash kernel and of rows of a mask in the other
_LARGEST_HEAD = 256


def fused_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns out and lse of one block; out is differentiable by autograd."""
    q, k, v = call.q, call.k, call.v
    allowed, is_causal = call.lower_mask()
    width = v.shape[-1]
    heads = _views(q, k, v)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, is_causal=is_causal, attn_mask=_summand(allowed, q), scale=call.scores.scale
        )
    elif _flash(q, allowed):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *heads, is_causal=is_causal, scale=call.scores.scale
        )
    else:
        bias = _expanded(_summand(allowed, q), q)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *heads, bias, True, is_causal=is_causal, scale=call.scores.scale
        )
        lse = lse.narrow(-1, 0, q.shape[0])
    lse = lse.detach()
    if allowed is not None:  # a row without keys
        empty = ~allowed.any(-1).unsqueeze(1)
        lse = lse.masked_fill(empty, -math.inf)
        out = out.masked_fill(empty.unsqueeze(-1), 0)
    return out.permute(2, 0, 1, 3).narrow(-1, 0, width), lse.permute(2, 0, 1)


@torch.no_grad()
def fused_backward(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of one block from the final out and lse."""
    q, k, v = call.q, call.k, call.v
    allowed, is_causal = call.lower_mask()
    width = v.shape[-1]
    heads = _views(q, k, v)
    finals = tuple(
        adjacent(_padded(x, q.shape[-1] - width)).permute(1, 2, 0, 3) for x in (dout, out)
    )
    rows = lse.permute(1, 2, 0)
    # All scores of a row without keys are -inf; any finite lse makes their probabilities zero.
    rows = rows.masked_fill(torch.isneginf(rows), 0)
    grads: tuple[Tensor, ...]
    if q.device.type == "cpu":
        bias = _summand(allowed, q)
        grads = gradients(finals[0], heads, finals[1], rows, is_causal, call.scores.scale, bias)
    elif _flash(q, allowed):
        grads = _flash_backward(finals, heads, rows, is_causal, call.scores.scale)
    else:
        bias = _expanded(_summand(allowed, q), q)
        grads = _efficient_backward(finals, heads, rows, bias, is_causal, call.scores.scale)
    dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
    groups = k.shape[2]
    if dk.shape[2] != groups:
        dk, dv = (x.view(*x.shape[:2], groups, -1, x.shape[3]).sum(3) for x in (dk, dv))
    return dq, dk, dv.narrow(-1, 0, width)


def fused_unsupported_reason(call: AttentionCall, *_: Tensor) -> str | None:
    """Returns why `fused_forward` and `fused_backward` do not support a call."""
    q, k, v = call.q, call.k, call.v
    if (reason := call.unsupported_option()) is not None:
        return reason
    if q.device.type not in ("cpu", "cuda"):
        return f"needs a CPU or CUDA tensor, q is on {q.device.type}"
    if q.device.type == "cuda" and q.dtype == torch.float64:
        return "CUDA kernels do not support float64"
    if q.device.type == "cuda" and (reason := missing_gpu_reason(q)) is not None:
        return reason
    if 0 in (*q.shape, *k.shape):
        return "it does not support empty tensors"
    if v.shape[-1] > q.shape[-1]:
        return f"value heads of {v.shape[-1]} channels are wider than query heads"
    return None


def _views(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `[b, n, s, d]`, with values as wide as queries and adjacent channels."""
    v = _padded(v, q.shape[-1] - v.shape[-1])
    if q.device.type != "cpu" and q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    first, second, third = (adjacent(x).permute(1, 2, 0, 3) for x in (q, k, v))
    return first, second, third


def _padded(x: Tensor, channels: int) -> Tensor:
    return functional.pad(x, (0, channels)) if channels else x


def _flash(q: Tensor, allowed: Tensor | None) -> bool:
    """Returns whether the flash kernel for CUDA supports the call."""
    width = q.shape[-1]
    fits = width % _ALIGNMENT == 0 and width <= _LARGEST_HEAD
    return allowed is None and fits and q.dtype in (torch.float16, torch.bfloat16)


def _summand(allowed: Bool[Tensor, "b_or_1 s t"] | None, q: Tensor) -> Tensor | None:
    """Returns the mask `[b or 1, 1, s, t]` as a summand of the scores in the dtype of `q`."""
    if allowed is None:
        return None
    forbidden = ~allowed.unsqueeze(1)
    return torch.zeros_like(forbidden, dtype=q.dtype).masked_fill_(forbidden, -math.inf)


def _expanded(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns a view `[b, n, s, t]` of the summand with aligned rows."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    aligned = _padded(bias, -keys % _ALIGNMENT).narrow(-1, 0, keys)
    return aligned.expand(q.shape[1], q.shape[2], -1, -1)


def _flash_backward(
    finals: tuple[Tensor, ...],
    heads: tuple[Tensor, ...],
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    dout, out = finals
    q, k, _ = heads
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout,
        *heads,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
        unused,
        unused,
        scale=scale,
    )
    return found


def _efficient_backward(
    finals: tuple[Tensor, ...],
    heads: tuple[Tensor, ...],
    lse: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    dout, out = finals
    # In 16 bits the kernel reads out as `[b, s, n, d]` in memory, whatever its strides say.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # Rows beyond the queries get probability exp(-inf).
    padded = functional.pad(lse, (0, -lse.shape[-1] % _ROWS), value=math.inf)
    unused = torch.zeros((), dtype=torch.int64)
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout,
        *heads,
        bias,
        out,
        padded,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return found[:3]
