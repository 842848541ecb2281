"""The scan of Mamba-2, state-space duality (Dao and Gu, 2024).

Each head has a state `[d, k]`. A token with the step `dt` multiplies it by `exp(dt a)` and adds the
outer product of `dt x` and `B`; its output is the product of the state and `C`.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.ssm import triton_scan
from megatron_kernels.ops.ssm.documents import number_documents
from megatron_kernels.ops.ssm.triton_scan import UNLIMITED
from megatron_kernels.ops.triton_op import NAME as TRITON
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op


class SsdOutput(NamedTuple):
    """Result of `ssd_scan`.

    Attributes:
        output: `[s, b, n, d]`, in the dtype of the inputs.
        state: `[b, n, d, k]`, in at least float32, after the last token of each sequence.
    """

    output: Float[Tensor, "s b n d"]
    state: Float[Tensor, "b n d k"]


class _Steps(NamedTuple):
    """What both backends need of each token.

    Attributes:
        dt: `[s, b, n]`, size of each step; 0 for padding.
        numbers: `[s, b]`, number of the document; None if there is one.
        real: `[s, b]`, False for padding; None if there is none.
    """

    dt: Tensor
    numbers: Tensor | None
    real: Tensor | None


def reference(
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
) -> SsdOutput:
    """Computes the recurrence token by token."""
    del chunk_size
    steps = _steps(dt, dt_bias, document_ids, dt_limits)
    values, rates = upcast(x), upcast(a)
    per_group = x.shape[2] // b.shape[2]
    b, c = (upcast(each).repeat_interleave(per_group, 2) for each in (b, c))
    now = _state_of(x, b, state)
    outputs = []
    for t in range(len(x)):
        if steps.numbers is not None and t > 0:
            same = steps.numbers[t] == steps.numbers[t - 1]
            now = torch.where(same[:, None, None, None], now, 0)
        decay = torch.exp(steps.dt[t] * rates)[..., None, None]
        entry = (steps.dt[t][..., None] * values[t])[..., None] * b[t][:, :, None]
        now = decay * now + entry
        outputs.append((now * c[t][:, :, None]).sum(-1))
    y = torch.stack(outputs) if outputs else torch.zeros_like(values)
    return SsdOutput(_finish(y, values, d, steps.real).to(x.dtype), now)


def chunked(
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
) -> SsdOutput:
    """Computes matrix products inside chunks, and passes the state from chunk to chunk.

    Shapes: chunks `z`, tokens of a chunk `i` and `j`, groups `g`, heads of a group `m`.
    """
    steps = _steps(dt, dt_bias, document_ids, dt_limits)
    values, groups = upcast(x), b.shape[2]
    length = min(chunk_size, len(x))
    b, c = (_in_chunks(upcast(each), length) for each in (b, c))
    steps_of = _in_chunks(torch.unflatten(steps.dt, 2, (groups, -1)), length)
    added = steps_of[..., None] * _in_chunks(torch.unflatten(values, 2, (groups, -1)), length)
    logs = (steps_of * upcast(a).view(groups, -1)).cumsum(1).permute(0, 2, 3, 4, 1)  # zbgmi
    inside, kept, carried = _documents_in_chunks(steps.numbers, length, logs)

    decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~inside, -math.inf).exp()
    scores = torch.einsum("zibgk,zjbgk->zbgij", c, b)
    y = torch.einsum("zbgmij,zjbgme->zibgme", scores[:, :, :, None] * decays, added)

    to_end = decays[..., -1, :].permute(0, 4, 1, 2, 3)[..., None]
    own = torch.einsum("zjbgme,zjbgk->zbgmek", added * to_end, b)
    factors = (logs[..., -1].exp() * carried)[..., None, None]
    now = torch.unflatten(_state_of(x, b, state), 1, (groups, -1))
    entering = []
    for factor, each in zip(factors, own, strict=True):
        entering.append(now)
        now = factor * now + each
    read = torch.einsum("zibgk,zbgmek->zibgme", c, torch.stack(entering))
    y = y + (logs.exp() * kept).permute(0, 4, 1, 2, 3)[..., None] * read
    y = y.flatten(0, 1).flatten(2, 3)[: len(x)]
    return SsdOutput(_finish(y, values, d, steps.real).to(x.dtype), now.flatten(1, 2))


def chunked_unsupported_reason(x: Tensor, *_: Any) -> str | None:
    """Returns that a sequence without tokens has no chunk."""
    return None if len(x) else "there are no tokens"


def kernels(*arguments: Any) -> SsdOutput:
    """Runs the Triton kernels."""
    return SsdOutput(*triton_scan.scan(*arguments))


@op(
    Backend(
        TRITON,
        kernels,
        triton_scan.unsupported_reason,
        "kernels of ours with chunks of 32 or 64 tokens",
        NEVER_RUN,
    ),
    Backend(
        "chunked", chunked, chunked_unsupported_reason, "plain torch, matrix products inside chunks"
    ),
    Backend("reference", reference, accept_all, "plain torch, the recurrence token by token"),
)
def ssd_scan(
    x: Float[Tensor, "s b n d"],
    dt: Float[Tensor, "s b n"],
    a: Float[Tensor, " n"],
    b: Float[Tensor, "s b g k"],
    c: Float[Tensor, "s b g k"],
    d: Float[Tensor, " n"] | None = None,
    dt_bias: Float[Tensor, " n"] | None = None,
    document_ids: Int[Tensor, "b s"] | None = None,
    state: Float[Tensor, "b n d k"] | None = None,
    chunk_size: int = 128,
    dt_limits: tuple[float, float] = UNLIMITED,
    *,
    backend: str = AUTO,
) -> SsdOutput:
    """Passes a state from token to token, which each token decays, adds to and reads.

    Args:
        x: Values `[s, b, n, d]`.
        dt: Step of each token and head `[s, b, n]`, before the bias and the softplus.
        a: Rate of decay of each head `[n]`, negative.
        b: What a value is added to the state with `[s, b, g, k]`; equally many heads share a group.
        c: What the state is read with `[s, b, g, k]`.
        d: Factor of `x` that is added to the output `[n]`. Defaults to none.
        dt_bias: Bias of the steps `[n]`. Defaults to none.
        document_ids: `[b, s]`, as in `Mask.document_ids`. The state is zero where a document
            begins. Padding leaves it as it is, and has the output zero. Defaults to one document.
        state: State before the first token, of its document. Defaults to zero.
        chunk_size: Tokens in a chunk of the backend `chunked`. Results depend on it by rounding.
        dt_limits: Smallest and largest step after the softplus.
        backend: "auto" or the name of one backend.

    Returns:
        The outputs, and the state after the last token. Both are computed in at least float32.

    Raises:
        KernelError: The groups do not divide the heads, or the chunk size is below 1.
    """
    if x.shape[2] % b.shape[2]:
        raise KernelError(
            f"ssd_scan: {b.shape[2]} groups do not divide {x.shape[2]} heads; use groups of "
            "equally many heads"
        )
    if chunk_size < 1:
        raise KernelError(f"ssd_scan: chunk_size is {chunk_size}; use at least 1")
    return ssd_scan.run(
        backend, x, dt, a, b, c, d, dt_bias, document_ids, state, chunk_size, dt_limits
    )


def _steps(
    dt: Tensor, bias: Tensor | None, ids: Tensor | None, limits: tuple[float, float]
) -> _Steps:
    """Returns the steps after bias, softplus and limits, and the documents."""
    size = functional.softplus(upcast(dt) if bias is None else upcast(dt) + upcast(bias))
    if limits != UNLIMITED:
        size = size.clamp(*limits)
    if ids is None:
        return _Steps(size, None, None)
    documents = number_documents(ids)
    real = documents.real.t()
    return _Steps(torch.where(real[..., None], size, 0), documents.numbers.t(), real)


def _state_of(x: Tensor, b: Tensor, state: Tensor | None) -> Tensor:
    """Returns the state before the first token."""
    if state is not None:
        return upcast(state)
    return upcast(x).new_zeros(*x.shape[1:], b.shape[-1])


def _finish(y: Tensor, x: Tensor, d: Tensor | None, real: Tensor | None) -> Tensor:
    """Adds the values themselves, and sets padding to zero."""
    if d is not None:
        y = y + upcast(d)[:, None] * x
    return y if real is None else torch.where(real[..., None, None], y, 0)


def _in_chunks(t: Tensor, length: int) -> Tensor:
    """Returns `[s, ...]` as `[z, length, ...]`, padded with zeros."""
    missing = -len(t) % length
    if missing:
        t = torch.cat([t, t.new_zeros(missing, *t.shape[1:])])
    return torch.unflatten(t, 0, (-1, length))


def _documents_in_chunks(
    numbers: Tensor | None, length: int, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns which steps connect: `[z, b, 1, 1, i, j]`, `[z, b, 1, 1, i]` and `[z, b, 1, 1]`.

    Those of two tokens of a chunk, of the state before the chunk and a token, and of the state
    before the chunk and the one after it.
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
    if numbers is None:
        every = logs.new_ones(1, 1, 1, 1, 1)
        return causal, every, every[..., 0]
    missing = -len(numbers) % length
    padded = torch.cat([numbers, numbers[-1:].expand(missing, -1)])
    own = torch.unflatten(padded, 0, (-1, length)).permute(0, 2, 1)[:, :, None, None]  # zb11i
    before = torch.cat([torch.zeros_like(own[:1, ..., -1]), own[:-1, ..., -1]])
    kept = own == before[..., None]
    inside = causal & (own[..., :, None] == own[..., None, :])
    return inside, kept, kept[..., -1]
