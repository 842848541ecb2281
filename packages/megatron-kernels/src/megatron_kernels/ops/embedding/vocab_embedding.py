"""Token embeddings of a part of a vocabulary, and their gradient added to a main gradient."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_kernels.ops.embedding import triton
from megatron_kernels.ops.embedding.rows import select_rows
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def _local(tokens: Tensor, rows: int, start: int) -> tuple[Tensor, Tensor]:
    """Returns the row of each token, 0 if it is absent, and whether it is absent."""
    local = tokens - start
    absent = (local < 0) | (local >= rows)
    return local.masked_fill(absent, 0), absent[..., None]


def reference(weight: Tensor, tokens: Tensor, start: int) -> Tensor:
    """Selects rows, and sets those of absent tokens to zero."""
    local, absent = _local(tokens, len(weight), start)
    rows = weight.index_select(0, local.flatten()).view(*local.shape, weight.shape[1])
    return torch.where(absent, 0.0, rows)


def fused(weight: Tensor, tokens: Tensor, start: int) -> Tensor:
    """Selects rows by kernels of torch, and sets those of absent tokens to zero."""
    local, absent = _local(tokens, len(weight), start)
    return select_rows(weight, local).masked_fill(absent, 0.0)


def adding_reference(into: Tensor, dy: Tensor, tokens: Tensor, start: int, first: bool) -> Tensor:
    """Multiplies by a matrix that has a one where a row is of a token."""
    numbers = torch.arange(len(into), device=into.device) + start
    matches = (tokens.flatten() == numbers[:, None]).to(into.dtype)
    added = matches @ dy.reshape(tokens.numel(), dy.shape[-1]).to(into.dtype)
    return into.copy_(added) if first else into.add_(added)


def adding_fused(into: Tensor, dy: Tensor, tokens: Tensor, start: int, first: bool) -> Tensor:
    """Calls `index_add_`; adds zeros for absent tokens."""
    local, absent = _local(tokens.flatten(), len(into), start)
    rows = dy.reshape(tokens.numel(), dy.shape[-1]).to(into.dtype).masked_fill(absent, 0.0)
    return (into.zero_() if first else into).index_add_(0, local, rows)


@op(
    triton_backend(
        triton.vocab_embedding, triton.unsupported_reason, "kernels of ours, without a mask"
    ),
    Backend("torch", fused, accept_all, "rows by kernels of torch, and a mask"),
    Backend("reference", reference, accept_all, "plain torch"),
)
def vocab_embedding(
    weight: Float[Tensor, "rows h"],
    tokens: Int[Tensor, "*tokens"],
    start: int = 0,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*tokens h"]:
    """Returns the embeddings of tokens from a part of the vocabulary; zeros for absent tokens.

    Args:
        weight: Rows of the tokens `start`, `start + 1`, ...
        tokens: Token ids of the whole vocabulary.
        start: Token of the first row.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., h]` in the dtype of the weight.
    """
    return vocab_embedding.run(backend, weight, tokens, start)


@op(
    triton_backend(
        triton.add_vocab_gradient,
        triton.adding_unsupported_reason,
        "a kernel of ours over sorted tokens",
    ),
    Backend("torch", adding_fused, accept_all, "index_add_ of rows in the main dtype"),
    Backend("reference", adding_reference, accept_all, "a product with a matrix of ones and zeros"),
)
def add_vocab_gradient(
    into: Float[Tensor, "rows h"],
    dy: Float[Tensor, "*tokens h"],
    tokens: Int[Tensor, "*tokens"],
    start: int = 0,
    first: bool = False,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "rows h"]:
    """Adds the gradient of `vocab_embedding` to the main gradient of its weight, in place.

    Args:
        into: The main gradient, such as float32 for a bfloat16 weight.
        dy: Gradient of the embeddings.
        tokens: Their token ids.
        start: Token of the first row.
        first: Whether it is the first gradient, which overwrites `into`.
        backend: "auto" or the name of one backend.

    Returns:
        `into`.
    """
    return add_vocab_gradient.run(backend, into, dy, tokens, start, first)
