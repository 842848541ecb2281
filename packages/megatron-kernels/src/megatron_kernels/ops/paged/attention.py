"""The operation of attention over keys and values in blocks."""

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores
from megatron_kernels.ops.batch_invariant import NAME, SLOWER
from megatron_kernels.ops.paged import dense, triton
from megatron_kernels.ops.paged.pages import Pages
from megatron_kernels.ops.triton_op import NAME as TRITON
from megatron_kernels.registry import AUTO, Backend, accept_all, op


@op(
    Backend(
        TRITON,
        triton.paged,
        triton.unsupported_reason,
        "kernels of ours over the block tables",
    ),
    Backend(
        "torch",
        dense.fused,
        dense.fused_unsupported_reason,
        "F.scaled_dot_product_attention on the pool in place, or on gathered blocks",
    ),
    Backend(
        NAME,
        dense.invariant,
        dense.invariant_unsupported_reason,
        "tiles at fixed positions",
        on_request=SLOWER,
    ),
    Backend("reference", dense.reference, accept_all, "plain torch on gathered blocks"),
)
def paged_attention(
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "blocks block_size g d"],
    v: Float[Tensor, "blocks block_size g dv"],
    pages: Pages,
    window: int | None = None,
    scores: Scores = PLAIN_SCORES,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "s b n dv"]:
    """Computes causal attention of the last tokens of sequences whose keys are in blocks.

    The queries of a sequence are its last ``s`` tokens: with a length of ``t`` keys, query ``i`` is
    at position ``t - s + i`` and attends to the keys up to its own. A query before the first key
    gets zeros. The pools get no gradient. All of their entries must be finite.

    Args:
        q: Queries of new tokens `[s, b, n, d]`.
        k: Pool of keys `[blocks, block_size, g, d]`. It holds those of the new tokens, too.
        v: Pool of values `[blocks, block_size, g, dv]`.
        pages: Blocks and length of each sequence.
        window: A query attends only to keys less than this many positions away, its own included.
            Defaults to all.
        scores: Scale, soft-cap, slopes and sinks. Defaults to q k^T / sqrt(d). torch supports a
            scale, the reference everything but a bias.
        backend: "auto" or the name of one backend.

    Returns:
        `[s, b, n, dv]` in the dtype of `q`.

    Raises:
        KernelError: Tensors do not fit each other, or blocks are not of the pool.
    """
    blocks, block_size, groups, _ = k.shape
    if v.shape[:3] != k.shape[:3]:
        raise KernelError(
            f"paged_attention: keys {list(k.shape)} and values {list(v.shape)} have different "
            "blocks or groups"
        )
    if q.shape[2] % groups:
        raise KernelError(
            f"paged_attention: {q.shape[2]} heads do not divide over {groups} query groups"
        )
    if window is not None and window < 1:
        raise KernelError(f"paged_attention: window is {window}; use at least 1 (the token itself)")
    if scores.bias is not None:
        raise KernelError("paged_attention: scores have a bias; use attention with gathered keys")
    scores.check_heads(q.shape[2])
    pages.check(q.shape[1], blocks, block_size)
    return paged_attention.run(backend, q, k, v, pages, window, scores)
