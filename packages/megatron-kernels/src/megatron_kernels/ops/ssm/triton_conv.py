"""Causal convolution by our Triton kernels."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.ssm.documents import encode_documents
from megatron_kernels.ops.triton_op import TritonOp, contiguous_rows

_MODULES: Final = (
    "megatron_kernels.triton_kernels.causal_conv",
    "megatron_kernels.ops.ssm.triton_conv",
)
_FORWARD: Final = TritonOp(
    "causal_conv_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? documents, "
    "Tensor? state) -> (Tensor, Tensor)",
    *_MODULES,
)
_BACKWARD: Final = TritonOp(
    "causal_conv_backward(Tensor dy, Tensor? dnext, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor? documents, Tensor? state) -> (Tensor, Tensor, Tensor, Tensor)",
    *_MODULES,
)
_MOST_TAPS: Final = 16
"""Longest filter, whose taps the kernels write out."""


def causal_conv_forward_fake(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Returns the outputs of `causal_conv_forward` without values."""
    return x.new_empty(x.shape), x.new_empty(x.shape[1], weight.shape[1] - 1, x.shape[2])


def causal_conv_backward_fake(
    dy: Tensor,
    dnext: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Returns the outputs of `causal_conv_backward` without values."""
    given = (x, weight, bias, state)
    return tuple(x.new_empty(0) if each is None else each.new_empty(each.shape) for each in given)


class _CausalConv(Function):
    """Inputs: those of the operation, with encoded documents."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _FORWARD(*given)
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dnext: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dy = torch.zeros_like(saved[0]) if dy is None else contiguous_rows(dy)
        dnext = None if dnext is None else dnext.contiguous()
        *found, of_state = _BACKWARD(dy, dnext, *saved)
        return tuple(
            gradient if wanted else None
            for gradient, wanted in zip((*found, None, of_state), ctx.needs_input_grad, strict=True)
        )


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns outputs and the next state, in one kernel each way; saves the arguments."""
    bias, state = (None if each is None else each.contiguous() for each in (bias, state))
    ids = encode_documents(document_ids)
    found: tuple[Tensor, Tensor] = _CausalConv.apply(  # type: ignore[no-untyped-call]
        contiguous_rows(x), weight.contiguous(), bias, ids, state
    )
    return found


def unsupported_reason(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    taps = weight.shape[1]
    if taps > _MOST_TAPS:
        return f"filters of {taps} taps are longer than {_MOST_TAPS}"
    return triton_op.unsupported_reason(x, weight, bias, state)
