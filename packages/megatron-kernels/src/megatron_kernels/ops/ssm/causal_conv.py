"""Causal convolution of each channel over time, with a state that continues a sequence."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.ssm import triton_conv
from megatron_kernels.ops.ssm.documents import number_documents
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op


class CausalConvOutput(NamedTuple):
    """Result of `causal_conv`.

    Attributes:
        output: `[s, b, c]`.
        state: `[b, k-1, c]`, the inputs that the next tokens of each sequence need: the last ones
            of its document, and zeros where the document is shorter.
    """

    output: Float[Tensor, "s b c"]
    state: Float[Tensor, "b k_1 c"]


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> CausalConvOutput:
    """Adds the products of each tap, without inputs of padding and of other documents."""
    taps, length = weight.shape[1], len(x)
    inputs = torch.cat([_state_of(x, taps, state), x])
    belongs = _window_numbers(document_ids, taps)
    own = None if belongs is None else belongs[taps - 1 :]
    total = torch.zeros_like(upcast(x)) if bias is None else upcast(bias).expand(x.shape)
    for tap in range(taps):
        part = upcast(inputs[tap : tap + length])
        if belongs is not None and own is not None:
            same = belongs[tap : tap + length] == own
            part = torch.where(same[..., None], part, 0)
        total = total + part * upcast(weight[:, tap])
    if own is not None:
        total = torch.where((own >= 0)[..., None], total, 0)
    return CausalConvOutput(total.to(x.dtype), _next_state(inputs, belongs, taps))


def fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> CausalConvOutput:
    """Calls `F.conv1d` with one group for each channel."""
    taps = weight.shape[1]
    inputs = torch.cat([_state_of(x, taps, state), x])
    y = functional.conv1d(inputs.permute(1, 2, 0), weight[:, None], bias, groups=len(weight))
    return CausalConvOutput(y.permute(2, 0, 1), _next_state(inputs, None, taps))


def fused_unsupported_reason(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    document_ids: Tensor | None = None,
    state: Tensor | None = None,
) -> str | None:
    """Returns why torch's convolution does not support the arguments, or None."""
    if document_ids is not None:
        return "there are document ids; it would read across document ends"
    if not len(x):
        return "there are no tokens"
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return f"x is {x.dtype}, weight {weight.dtype}; they must agree"
    return None


def kernels(*arguments: Tensor | None) -> CausalConvOutput:
    """Runs the Triton kernels."""
    return CausalConvOutput(*triton_conv.causal_conv(*arguments))  # type: ignore[arg-type]


@op(
    triton_backend(
        kernels, triton_conv.unsupported_reason, "one kernel of ours each way", NEVER_RUN
    ),
    Backend("conv1d", fused, fused_unsupported_reason, "F.conv1d"),
    Backend("reference", reference, accept_all, "plain torch, sums in float32 or float64"),
)
def causal_conv(
    x: Float[Tensor, "s b c"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None = None,
    document_ids: Int[Tensor, "b s"] | None = None,
    state: Float[Tensor, "b k_1 c"] | None = None,
    *,
    backend: str = AUTO,
) -> CausalConvOutput:
    """Convolves each channel with its own filter over the token itself and those before it.

    Args:
        x: Inputs `[s, b, c]`.
        weight: Filters `[c, k]`; the last tap is that of the token itself.
        bias: `[c]`, added to each output. Defaults to none.
        document_ids: `[b, s]`, as in `Mask.document_ids`. Inputs of other documents and of padding
            count as zero. The output of padding is zero. Padding follows the tokens of a sequence.
            Defaults to one document.
        state: `[b, k-1, c]`, inputs before the first token, of its document. Defaults to zeros.
        backend: "auto" or the name of one backend.

    Returns:
        Outputs in the dtype of `x`, and the state for the next tokens.
    """
    return causal_conv.run(backend, x, weight, bias, document_ids, state)


def _state_of(x: Tensor, taps: int, state: Tensor | None) -> Tensor:
    """Returns the inputs before the first token `[k-1, b, c]`."""
    if state is None:
        return x.new_zeros(taps - 1, *x.shape[1:])
    return state.transpose(0, 1).to(x.dtype)


def _window_numbers(document_ids: Tensor | None, taps: int) -> Tensor | None:
    """Returns the document of each entry of state and inputs `[k-1 + s, b]`; -1 is padding."""
    if document_ids is None:
        return None
    documents = number_documents(document_ids)
    numbers = torch.where(documents.real, documents.numbers, -1)
    return functional.pad(numbers, (taps - 1, 0)).t()  # the state is of the first document


def _next_state(inputs: Tensor, belongs: Tensor | None, taps: int) -> Tensor:
    """Returns the last inputs of each sequence `[b, k-1, c]`."""
    if belongs is None or taps == 1:
        return inputs[len(inputs) - taps + 1 :].transpose(0, 1)
    index = torch.arange(len(inputs), device=inputs.device)[:, None]
    end = torch.where(belongs >= 0, index, taps - 2).amax(0)  # of the last token
    wanted = end - torch.arange(taps - 2, -1, -1, device=inputs.device)[:, None]
    same = belongs.gather(0, wanted) == belongs.gather(0, end[None])
    columns = torch.arange(inputs.shape[1], device=inputs.device)
    return torch.where(same[..., None], inputs[wanted, columns], 0).transpose(0, 1)
