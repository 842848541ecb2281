"""The attention operation."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.ops.attention import flex as flex_attention
from megatron_kernels.ops.attention import triton
from megatron_kernels.ops.attention.batch_invariant import (
    invariant,
    invariant_unsupported_reason,
)
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.documents import by_document, over_documents
from megatron_kernels.ops.attention.dropout import DropoutLike
from megatron_kernels.ops.attention.flash import (
    FLASH,
    FLASH_3,
    flash,
    flash_3,
    flash_3_unsupported_reason,
    flash_unsupported_reason,
)
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.reference import reference
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores
from megatron_kernels.ops.attention.sdpa import sdpa, sdpa_unsupported_reason
from megatron_kernels.ops.attention.tiles import tiled, tiled_unsupported_reason
from megatron_kernels.ops.batch_invariant import NAME, SLOWER
from megatron_kernels.ops.triton_op import NAME as TRITON
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op


@op(
    Backend(FLASH, flash, flash_unsupported_reason, "flash-attn 2, dense and varlen", NEVER_RUN),
    Backend(
        FLASH_3, flash_3, flash_3_unsupported_reason, "flash-attn 3, dense and varlen", NEVER_RUN
    ),
    Backend("torch", sdpa, sdpa_unsupported_reason, "F.scaled_dot_product_attention"),
    Backend(
        flex_attention.NAME,
        flex_attention.flex,
        flex_attention.flex_unsupported_reason,
        "FlexAttention, compiled by shape",
        on_request="it compiles for every shape",
    ),
    Backend(
        TRITON,
        triton.attention,
        triton.unsupported_reason,
        "kernels of ours with masks by rules and dropout by a hash",
    ),
    Backend("tiles", tiled, tiled_unsupported_reason, "tiles in the cache, for dropout on CPUs"),
    Backend(
        NAME, invariant, invariant_unsupported_reason, "tiles at fixed positions", on_request=SLOWER
    ),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
    given=lambda *arguments: (AttentionCall(*arguments),),
)
def attention(
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "t b g d"],
    v: Float[Tensor, "t b g dv"],
    mask: Mask,
    scores: Scores = PLAIN_SCORES,
    query_offset: int = 0,
    dropout: DropoutLike | None = None,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "s b n dv"]:
    """Computes softmax(scores of q and k, where allowed) v for every head.

    Args:
        q: Queries `[s, b, n, d]`.
        k: Keys `[t, b, g, d]`; each of the g groups serves n/g neighbouring heads.
        v: Values `[t, b, g, dv]`, usually dv = d.
        mask: Which queries may attend to which keys. A query that may attend to nothing (padding)
            gets zeros.
        scores: Scale, soft-cap, biases and sinks. Defaults to q k^T / sqrt(d). flash-attn supports
            all but sinks and a bias, torch a scale and a bias, the reference everything.
        query_offset: Index of the first query among the keys: the number of tokens that a key-value
            cache held before these. Keys after the last query may be unused room of a cache.
        dropout: Applied to the probabilities `[b, n, s, t]` (float32; float64 for float64) before
            they weight the values; returns the same shape and dtype. Only the reference, which
            materializes the probabilities, can apply any function. On a CPU the backend `tiles`
            applies a `TiledDropout`, part by part; on CUDA the backend `triton` a `HashedDropout`.
        backend: "auto" or the name of one backend.

    Returns:
        `[s, b, n, dv]` in the dtype of `q`; its memory need not be contiguous.

    Raises:
        KernelError: n is not a multiple of g, slopes or sinks are not one for each head, or a bias
            is not one for each score.
    """
    call = AttentionCall(q, k, v, mask, scores, query_offset, dropout)
    call.check_shapes()
    if by_document(call) and not _in_one_call(backend):
        return over_documents(partial(attention.run, backend), call)
    return attention.run(backend, call)


def takes_lengths(backend: str) -> bool:
    """Returns whether a requested backend takes packed documents in one call by their lengths.

    A model then calls `Mask.prepare` with ``read_lengths``.
    """
    return backend.partition(",")[0] in (FLASH, FLASH_3)


def _in_one_call(backend: str) -> bool:
    """Returns whether a requested backend takes packed documents in one call, or by rules."""
    return takes_lengths(backend) or backend.partition(",")[0] == TRITON
