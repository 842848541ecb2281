"""The scan of Mamba-2 by our Triton kernels: chunks in both passes, one token in a kernel.

Only the inputs, the states before chunks, and two numbers for each token and head are saved.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.ssm.documents import encode_documents
from megatron_kernels.ops.triton_op import TritonOp, contiguous_rows

_FAKES: Final = "megatron_kernels.ops.ssm.triton_scan"
_GIVEN: Final = (
    "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
    "Tensor? documents, Tensor? state"
)
_FORWARD: Final = TritonOp(
    f"ssd_forward({_GIVEN}, int chunk, float[] limits) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "megatron_kernels.triton_kernels.ssd_forward",
    _FAKES,
)
_BACKWARD: Final = TritonOp(
    f"ssd_backward(Tensor dy, Tensor? dlast, {_GIVEN}, Tensor states, Tensor step, Tensor log, "
    "int chunk, float[] limits) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "megatron_kernels.triton_kernels.ssd_backward",
    _FAKES,
)
_STEP: Final = TritonOp(
    f"ssd_step({_GIVEN}, float[] limits) -> (Tensor, Tensor)",
    "megatron_kernels.triton_kernels.ssd_step",
    _FAKES,
)
UNLIMITED: Final = (0.0, math.inf)
"""Limits of steps that limit none."""

_NARROW: Final = 128
_WIDEST: Final = 256
"""Most channels of a head and of its state: in all dtypes, and in bfloat16."""


def ssd_forward_fake(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the outputs of `ssd_forward` without values."""
    s, batch, heads, width = x.shape
    chunk = rest[-2]
    wide = torch.promote_types(x.dtype, torch.float32)
    last = x.new_empty(batch, heads, width, b.shape[-1], dtype=wide)
    stored = wide if x.dtype == torch.float16 else x.dtype
    states = x.new_empty((s + chunk - 1) // chunk, *last.shape, dtype=stored)
    step, log = (x.new_empty(batch, heads, s, dtype=wide) for _ in range(2))
    return x.new_empty(x.shape), last, states, step, log


def ssd_backward_fake(
    dy: Tensor,
    dlast: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Returns the outputs of `ssd_backward` without values."""
    given = (x, dt, a, b, c, d, dt_bias, state)
    return tuple(x.new_empty(0) if each is None else each.new_empty(each.shape) for each in given)


def ssd_step_fake(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns the outputs of `ssd_step` without values."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(*x.shape[1:], b.shape[-1], dtype=wide)


class _Scan(Function):
    """Inputs: those of the operation, with encoded documents, tokens of a chunk, and limits."""

    @staticmethod
    def forward(
        ctx: Any, limits: tuple[float, ...], chunk: int, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, last, *saved = _FORWARD(*given, chunk, limits)
        ctx.save_for_backward(*given, *saved)
        ctx.limits, ctx.chunk = limits, chunk
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dy = torch.zeros_like(saved[0]) if dy is None else contiguous_rows(dy)
        dlast = None if dlast is None else dlast.contiguous()
        *found, of_state = _BACKWARD(dy, dlast, *saved, ctx.chunk, ctx.limits)
        grads = (
            gradient if wanted else None
            for gradient, wanted in zip(
                (*found, None, of_state), ctx.needs_input_grad[2:], strict=True
            )
        )
        return None, None, *grads


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int = 128,
    dt_limits: tuple[float, float] = UNLIMITED,
) -> tuple[Tensor, Tensor]:
    """Returns outputs `[s, b, n, d]` and the last state `[b, n, d, k]`.

    The kernels have a chunk length of their own, so ``chunk_size`` has no effect.
    """
    del chunk_size
    limits = () if dt_limits == UNLIMITED else dt_limits
    x, b, c = (contiguous_rows(each) for each in (x, b, c))
    d, dt_bias, state = (
        None if each is None else each.contiguous() for each in (d, dt_bias, state)
    )
    ids = encode_documents(document_ids)
    given = (x, dt, a.contiguous(), b, c, d, dt_bias, ids, state)
    differentiates = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in given
    )
    if len(x) == 1 and not differentiates:
        found: tuple[Tensor, Tensor] = _STEP(*given, limits)
        return found
    scanned: tuple[Tensor, Tensor] = _Scan.apply(  # type: ignore[no-untyped-call]
        limits, _chunk(x, b), *given
    )
    return scanned


def _chunk(x: Tensor, b: Tensor) -> int:
    """Returns the tokens of a chunk: as many as tiles of this width leave room for on the chip."""
    narrow = max(x.shape[-1], b.shape[-1]) <= _NARROW
    return 64 if narrow and x.dtype == torch.bfloat16 else 32


def unsupported_reason(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
    *_: Any,
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    if not x.numel() or not b.numel():
        return "there are no tokens, heads or channels"
    widest = max(x.shape[-1], b.shape[-1])
    most = _WIDEST if x.dtype == torch.bfloat16 else _NARROW
    if widest > most:
        return f"heads or states of {widest} channels are wider than {most}, the most in {x.dtype}"
    if not x.dtype == b.dtype == c.dtype:
        return f"x is {x.dtype}, b {b.dtype} and c {c.dtype}; they must agree"
    if x.is_cuda and x.dtype == torch.float64:
        return "on CUDA it does not support float64"
    return triton_op.unsupported_reason(x, dt, a, b, c, d, dt_bias, state)
