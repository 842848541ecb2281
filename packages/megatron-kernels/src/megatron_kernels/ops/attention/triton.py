"""Attention by our Triton kernels: softmax online, any mask by rules, dropout by a hash."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.triton_op import TritonOp, contiguous_rows

_FORWARD: Final = TritonOp(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor?[] tensors, SymInt[] numbers, "
    "float[] factors) -> (Tensor, Tensor)",
    "megatron_kernels.triton_kernels.attention",
    "megatron_kernels.ops.attention.triton",
)
_BACKWARD: Final = TritonOp(
    "attend_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor? sinks, Tensor?[] tensors, SymInt[] numbers, float[] factors) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "megatron_kernels.triton_kernels.attention_backward",
    "megatron_kernels.ops.attention.triton",
)
_LARGEST_HEAD: Final = 256
_WORD: Final = 2**32

Tensors = tuple[Tensor | None, ...]


def attend_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of `attend` without values."""
    s, b, n, _ = q.shape
    statistics = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(s, b, n, v.shape[-1]), q.new_empty(b, n, s, dtype=statistics)


def attend_backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the outputs of `attend_backward` without values."""
    of_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, of_sinks


class _Attention(Function):
    """Inputs: queries, keys, values, sinks, and what `Call` of the kernels describes."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        numbers: tuple[int, ...],
        factors: tuple[float, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (contiguous_rows(x) for x in (q, k, v))
        out, lse = _FORWARD(q, k, v, sinks, tensors, numbers, factors)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *tensors)
        ctx.mark_non_differentiable(lse)
        ctx.numbers, ctx.factors = numbers, factors
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
        *found, of_sinks = _BACKWARD(
            contiguous_rows(grads[0]), q, k, v, out, lse, sinks, tensors, ctx.numbers, ctx.factors
        )
        rest = (None,) * (2 + len(tensors))
        return *found, None if sinks is None else of_sinks, *rest


def attention(call: AttentionCall) -> Tensor:
    """Returns attention, differentiable by autograd; saves the output and its log-sum-exp."""
    return block_forward(call)[0]


def block_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns out `[s, b, n, dv]`, differentiable by autograd, and lse `[s, b, n]` of one block."""
    tensors, numbers, factors = _arguments(call)
    out, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        call.q, call.k, call.v, call.scores.sinks, numbers, factors, *tensors
    )
    return out, lse.permute(2, 0, 1)


@torch.no_grad()
def block_backward(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of one block from the final out and lse."""
    tensors, numbers, factors = _arguments(call)
    given = (contiguous_rows(x) for x in (dout, call.q, call.k, call.v, out))
    rows = lse.permute(1, 2, 0).contiguous()
    dq, dk, dv, _ = _BACKWARD(*given, rows, None, tensors, numbers, factors)
    return dq, dk, dv


def _arguments(call: AttentionCall) -> tuple[Tensors, tuple[int, ...], tuple[float, ...]]:
    """Returns the tensors, numbers and factors of `Call` of the kernels."""
    mask, scores, extent = call.mask, call.scores, call.extent()
    documents = positions = prefixes = dense = None
    rules = (0,) * 4  # window, chunk, prefix, causal
    if not mask.has_rules:
        dense = mask.allowed(*extent).contiguous()
    else:
        documents = mask.documents_of(*extent)
        prefix = mask.prefix if mask.causal else None
        if isinstance(prefix, Tensor):
            prefixes, prefix = prefix, 0
        rules = (mask.window or 0, mask.chunk or 0, prefix or 0, int(mask.causal))
    if mask.compares_positions or scores.slopes is not None:
        positions = mask.positions_of(*extent)
    of_tokens = (*(documents or (None, None)), *(positions or (None, None)))
    words, channels, factor = _dropout(call.dropout, call.k.shape[0])
    tensors = (*map(_line, of_tokens), prefixes, dense, scores.slopes, *words)
    numbers = (call.query_offset, *rules, *channels)
    return tensors, numbers, (call.scale(), scores.softcap, factor)


def _dropout(dropout: Any, keys: int) -> tuple[Tensors, tuple[int, ...], float]:
    """Returns the words and columns of dropout, its numbers and its factor."""
    if dropout is None:
        return (None,) * 3, (0,) * 5, 1.0
    found = dropout.hash_numbers(keys)
    first = _signed(found.first_head * found.length)
    words = (found.word0.contiguous(), found.word1.contiguous(), _line(found.columns))
    site = found.site
    return words, (first, found.length, site.word0, site.word1, site.least), site.scale


def _signed(number: int) -> int:
    """Returns the lowest 32 bits of a number as a signed number."""
    return (number + _WORD // 2) % _WORD - _WORD // 2


def _line(x: Tensor | None) -> Tensor | None:
    """Returns `[b or 1, tokens]` with the tokens of a sample next to one another."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def unsupported_reason(call: AttentionCall, *_: Tensor) -> str | None:
    """Returns why the kernels of both passes do not support a call."""
    q, k, v, slopes = call.q, call.k, call.v, call.scores.slopes
    if call.dropout is not None and not hasattr(call.dropout, "hash_numbers"):
        return "the dropout is not a hash of each element"
    reason = call.unsupported_option("dropout", "sinks", "softcap", "slopes")
    if reason is not None:
        return reason
    if slopes is not None and slopes.requires_grad:
        return "it gives slopes no gradient"
    widest = max(q.shape[-1], v.shape[-1])
    if widest > _LARGEST_HEAD:
        return f"heads of {widest} channels are wider than {_LARGEST_HEAD}"
    if not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; they must agree"
    if q.is_cuda and q.dtype == torch.float64:
        return "on CUDA it does not support float64"
    return triton_op.unsupported_reason(q, k, v)
