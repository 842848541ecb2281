"""Attention of short sequences in 16 bits on a CPU, with a backward pass in float32.

In the backward pass, torch's kernel has a cost for each head in 16 bits that it does not have in
float32. Up to 256 tokens this exceeds what products in 16 bits save: 8 x 4 heads of 128 tokens take
11 ms in bfloat16 and 3 ms in float32. The gradients are more exact in float32, too.
"""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SHORT: Final = 256
"""Largest number of queries and of keys for which float32 is faster."""

_HALVES: Final = (torch.bfloat16, torch.float16)


def is_short_half(q: Float[Tensor, "b n s d"], k: Float[Tensor, "b g t d"]) -> bool:
    """Returns whether a backward pass on a CPU is faster in float32 than in the dtype of `q`."""
    longest, shortest = max(q.shape[2], k.shape[2]), min(*q.shape, *k.shape)
    return q.device.type == "cpu" and q.dtype in _HALVES and longest <= SHORT and shortest > 0


def attend(
    q: Float[Tensor, "b n s d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t d"],
    is_causal: bool,
    scale: float | None,
) -> Float[Tensor, "b n s d"]:
    """Returns attention without a mask tensor. Its backward pass is that of `gradients`."""
    q, k, v = (adjacent(x) for x in (q, k, v))
    out: Tensor = _Attend.apply(q, k, v, is_causal, scale)  # type: ignore[no-untyped-call]
    return out


def adjacent(x: Float[Tensor, "*dims d"]) -> Float[Tensor, "*dims d"]:
    """Returns a tensor whose channels are neighbours in memory; the kernels do not check that."""
    return x if x.stride(-1) == 1 else x.contiguous()


def gradients(
    dout: Float[Tensor, "b n s d"],
    heads: tuple[Tensor, Tensor, Tensor],
    out: Float[Tensor, "b n s d"],
    lse: Float[Tensor, "b n s"],
    is_causal: bool,
    scale: float | None,
    mask: Float[Tensor, "b_or_1 1 s t"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values on a CPU.

    Args:
        dout: Gradient of the output.
        heads: Queries, keys and values.
        out: The output.
        lse: The log-sum-exp of the scores of each query.
        is_causal: Whether queries attend to keys up to their own index only.
        scale: Factor of the scores. None means 1/sqrt(d).
        mask: Summand of the scores.
    """
    dtype = heads[0].dtype
    given = [adjacent(x) for x in (dout, *heads, out)]
    if is_short_half(heads[0], heads[1]):
        given = [x.float() for x in given]
        mask = None if mask is None else mask.float()
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
    ) -> Tensor:
        out: Tensor
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*gradients(grads[0], (q, k, v), out, lse, *ctx.options), None, None)
