"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks").

A head holds a state `S` of `[d, dv]`, which maps keys to values. A token decays it, corrects what
it recalls for the token's key, and reads it with the query:

    S = exp(log_decay) S      S = S + beta k (v - S^T k)^T      out = S^T q / sqrt(d)
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.ssm.documents import DocumentNumbers, number_documents
from megatron_kernels.registry import AUTO, Backend, accept_all, op

CHUNK = 64
_EPSILON = 1e-6
_NEVER = float("-inf")


class GatedDeltaRuleOutput(NamedTuple):
    """Result of `gated_delta_rule`.

    Attributes:
        output: `[s, b, n, dv]` in the dtype of the values.
        state: `[b, n, d, dv]` after the last token, in float32, or float64 for float64.
    """

    output: Float[Tensor, "s b n dv"]
    state: Float[Tensor, "b n d dv"]


def step_by_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    l2_norm: bool,
) -> GatedDeltaRuleOutput:
    """Computes one token after the other."""
    dtype, heads = v.dtype, v.shape[2]
    q, k = (_of_heads(x, heads, l2_norm) for x in (q, k))
    q, v, log_decay, beta = q * q.shape[-1] ** -0.5, upcast(v), upcast(log_decay), upcast(beta)
    state, out = _state(k, v, initial_state), []
    if document_ids is not None:
        documents = number_documents(document_ids)
        padding = ~documents.real.t()[..., None]
        first = documents.numbers.diff(dim=1, prepend=documents.numbers[:, :1]).t()[..., None] > 0
        log_decay = log_decay.masked_fill(padding, 0).masked_fill(first, _NEVER)
        beta = beta.masked_fill(padding, 0)
    for query, key, value, decay, weight in zip(q, k, v, log_decay.exp(), beta, strict=True):
        state = state * decay[..., None, None]
        recalled = torch.einsum("bnd,bnde->bne", key, state)
        change = weight[..., None] * (value - recalled)
        state = state + key[..., None] * change[..., None, :]
        out.append(torch.einsum("bnd,bnde->bne", query, state))
    y = torch.stack(out) if out else torch.zeros_like(v)
    if document_ids is not None:
        y = y.masked_fill(padding[..., None], 0)
    return GatedDeltaRuleOutput(y.to(dtype), state)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    l2_norm: bool,
) -> GatedDeltaRuleOutput:
    """Computes chunks of tokens with matrix products (section 3.3 of the paper).

    Within a chunk, the changes `u` that its tokens make solve a triangular system, whose right side
    depends linearly on the state `S` before the chunk: `u = fresh - recalled S`. Only the states
    are computed one after the other.
    """
    dtype, length, heads = v.dtype, len(v), v.shape[2]
    size = min(CHUNK, length)

    def cut(x: Tensor) -> Tensor:
        """Returns `[s, b, n, ...]` as `[b, n, chunk, c, ...]`; zeros fill the last chunk."""
        x = x.permute(1, 2, 0, *range(3, x.ndim))
        short = -length % size
        x = functional.pad(x, (0, 0) * (x.ndim - 3) + (0, short)) if short else x
        return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])

    q, k = (_of_heads(x, heads, l2_norm) for x in (q, k))
    q, v, log_decay, beta = q * q.shape[-1] ** -0.5, upcast(v), upcast(log_decay), upcast(beta)
    state = _state(k, v, initial_state)
    chunks = None
    if document_ids is not None:
        documents = number_documents(document_ids)
        chunks = _DocumentsOfChunks(documents, size)
        padding = ~documents.real.t()[..., None]
        log_decay, beta = log_decay.masked_fill(padding, 0), beta.masked_fill(padding, 0)
    q, k, v, log_decay, beta = (cut(x) for x in (q, k, v, log_decay, beta))

    total = log_decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(
        torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1), _NEVER
    )
    from_start, to_end, whole = total, total[..., -1:] - total, total[..., -1]
    if chunks is not None:
        between = between.masked_fill(~chunks.same, _NEVER)
        from_start = from_start.masked_fill(~chunks.continued, _NEVER)
        to_end = to_end.masked_fill(~chunks.continues, _NEVER)
        whole = whole.masked_fill(~chunks.passed_on, _NEVER)
    between, whole = between.exp(), whole.exp()[..., None, None]

    system = (beta[..., None] * (k @ k.mT) * between).tril(-1)
    keys = k * (beta * from_start.exp())[..., None]
    right = torch.cat((v * beta[..., None], keys), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, recalled = solved.split((v.shape[-1], k.shape[-1]), -1)
    queries = q * from_start.exp()[..., None]
    keys = (k * to_end.exp()[..., None]).mT
    changes, reads = [], []
    for index in range(k.shape[2]):
        change = fresh[:, :, index] - recalled[:, :, index] @ state
        changes.append(change)
        reads.append(queries[:, :, index] @ state)
        state = state * whole[:, :, index] + keys[:, :, index] @ change
    y = torch.stack(reads, 2) + (q @ k.mT * between) @ torch.stack(changes, 2)
    y = y.flatten(2, 3)[:, :, :length].permute(2, 0, 1, 3)
    if document_ids is not None:
        y = y.masked_fill(padding[..., None], 0)
    return GatedDeltaRuleOutput(y.to(dtype), state)


def chunked_unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    l2_norm: bool,
) -> str | None:
    """Returns that fewer than two tokens make no chunk."""
    return "one token is one step" if len(v) < 2 else None


@op(
    Backend("torch", chunked, chunked_unsupported_reason, f"chunks of {CHUNK} tokens, WY form"),
    Backend("reference", step_by_step, accept_all, "one token after the other"),
)
def gated_delta_rule(
    q: Float[Tensor, "s b g d"],
    k: Float[Tensor, "s b g d"],
    v: Float[Tensor, "s b n dv"],
    log_decay: Float[Tensor, "s b n"],
    beta: Float[Tensor, "s b n"],
    document_ids: Int[Tensor, "b s"] | None = None,
    initial_state: Float[Tensor, "b n d dv"] | None = None,
    l2_norm: bool = False,
    *,
    backend: str = AUTO,
) -> GatedDeltaRuleOutput:
    """Computes the gated delta rule for every value head.

    Args:
        q: Queries `[s, b, g, d]`, multiplied by 1 / sqrt(d).
        k: Keys `[s, b, g, d]`; each of the g key heads serves n/g neighbouring value heads.
        v: Values `[s, b, n, dv]`.
        log_decay: Logarithm of each token's decay of the state, at most 0.
        beta: Share of its recalled value that a token replaces, usually in (0, 1).
        document_ids: The first token of each document starts from a state of zeros. -1 is padding,
            which leaves the state as it is and has an output of zeros.
        initial_state: State before the first token, for the document of the first token that is
            no padding. Defaults to zeros.
        l2_norm: Whether to divide each query and key by its length, `sqrt(x x + 1e-6)`.
        backend: "auto" or the name of one backend.

    Returns:
        Outputs, and the state after the last token. All is computed in the dtype of the state.

    Raises:
        KernelError: n is not a multiple of g, or there is no token.
    """
    if v.shape[2] % k.shape[2]:
        raise KernelError(
            f"gated_delta_rule: {v.shape[2]} value heads do not divide over {k.shape[2]} key heads"
        )
    if not len(v):
        raise KernelError("gated_delta_rule: there is no token; pass at least one")
    return gated_delta_rule.run(
        backend, q, k, v, log_decay, beta, document_ids, initial_state, l2_norm
    )


class _DocumentsOfChunks:
    """Which tokens of chunks belong to one document, `[b, 1, chunk, c]` for all heads."""

    def __init__(self, documents: DocumentNumbers, size: int) -> None:
        order = documents.numbers
        short = -order.shape[1] % size
        order = torch.cat((order, order[:, -1:].expand(-1, short)), 1)
        order = order.view(len(order), 1, -1, size)
        last = order[..., -1]
        before = functional.pad(last[..., :-1], (1, 0))
        self.same = order[..., :, None] == order[..., None, :]
        self.continued = order == before[..., None]  # from the state before the chunk
        self.continues = order == last[..., None]  # in the state after the chunk
        self.passed_on = last == before


def _of_heads(x: Tensor, heads: int, l2_norm: bool) -> Tensor:
    """Returns queries or keys of each value head, normalized if asked for."""
    x = upcast(x)
    if l2_norm:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)
    return x.repeat_interleave(heads // x.shape[2], 2)


def _state(k: Tensor, v: Tensor, initial: Tensor | None) -> Tensor:
    """Returns the state before the first token."""
    if initial is not None:
        return initial.to(v.dtype)
    return v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1])
