"""The pair of block operations for ring attention: one block of keys, forward and backward.

A block pass also returns lse, the log-sum-exp of each row. Passes over disjoint sets of keys are
combined by weighting each `out` with exp(lse - logaddexp of all lse). The backward pass takes the
*final* out and lse and recomputes p = exp(scores - lse), so a block's part of the gradients needs
nothing from other blocks (Dao, FlashAttention-2, section 3.1).
"""

from typing import Final

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.attention import triton
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.dropout import DropoutLike
from megatron_kernels.ops.attention.fused_blocks import (
    fused_backward,
    fused_forward,
    fused_unsupported_reason,
)
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.reference import reference_backward, reference_forward
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores
from megatron_kernels.ops.attention.tiles import (
    tiled_backward,
    tiled_forward,
    tiled_unsupported_reason,
)
from megatron_kernels.ops.triton_op import NAME as TRITON
from megatron_kernels.registry import AUTO, Backend, accept_all, op

_TILES: Final = "tiles in the cache, for dropout on CPUs"
_TRITON: Final = "kernels of ours with masks by rules and dropout by a hash"


@op(
    Backend("torch", fused_forward, fused_unsupported_reason, "fused kernels of torch"),
    Backend(TRITON, triton.block_forward, triton.unsupported_reason, _TRITON),
    Backend("tiles", tiled_forward, tiled_unsupported_reason, _TILES),
    Backend("reference", reference_forward, accept_all, "plain torch, in float32 or float64"),
    given=lambda *arguments: (AttentionCall(*arguments),),
)
def attention_forward(
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "t b g d"],
    v: Float[Tensor, "t b g dv"],
    mask: Mask,
    scores: Scores = PLAIN_SCORES,
    query_offset: int = 0,
    dropout: DropoutLike | None = None,
    *,
    backend: str = AUTO,
) -> tuple[Float[Tensor, "s b n dv"], Float[Tensor, "s b n"]]:
    """Computes attention over one block of keys.

    Args:
        q: Queries `[s, b, n, d]`.
        k: Keys `[t, b, g, d]`; each of the g groups serves n/g heads.
        v: Values `[t, b, g, dv]`.
        mask: Which queries may attend to which keys of this block.
        scores: Scale, soft-cap and biases, as in `attention`. Sinks belong to a whole row:
            they are one more block, whose out is zero and whose lse is the sink.
        query_offset: Index of the first query among the keys.
        dropout: Applied to the block's probabilities `[b, n, s, t]`: a product with a mask that is
            the same in the backward pass. The lse is that of all probabilities.
        backend: "auto" or the name of one backend.

    Returns:
        out `[s, b, n, dv]` in the dtype of `q`, and lse `[s, b, n]` in float32 (float64 for
        float64), -inf for a row that may attend to nothing, whose out is zero. The lse is without
        gradient.

    Raises:
        KernelError: The scores have sinks.
    """
    call = AttentionCall(q, k, v, mask, scores, query_offset, dropout)
    _check_block(scores)
    return attention_forward.run(backend, call)


@op(
    Backend("torch", fused_backward, fused_unsupported_reason, "fused kernels of torch"),
    Backend(TRITON, triton.block_backward, triton.unsupported_reason, _TRITON),
    Backend("tiles", tiled_backward, tiled_unsupported_reason, _TILES),
    Backend("reference", reference_backward, accept_all, "plain torch, in float32 or float64"),
    given=lambda dout, q, k, v, out, lse, *rest: (AttentionCall(q, k, v, *rest), dout, out, lse),
)
def attention_backward(
    dout: Float[Tensor, "s b n dv"],
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "t b g d"],
    v: Float[Tensor, "t b g dv"],
    out: Float[Tensor, "s b n dv"],
    lse: Float[Tensor, "s b n"],
    mask: Mask,
    scores: Scores = PLAIN_SCORES,
    query_offset: int = 0,
    dropout: DropoutLike | None = None,
    *,
    backend: str = AUTO,
) -> tuple[Float[Tensor, "s b n d"], Float[Tensor, "t b g d"], Float[Tensor, "t b g dv"]]:
    """Computes the gradients of attention from one block of keys. They are without gradient.

    Args:
        dout: Gradient of the final output.
        q: Queries.
        k: Keys of this block.
        v: Values of this block.
        out: The final output, combined over all blocks.
        lse: The final log-sum-exp, combined over all blocks.
        mask: Which queries may attend to which keys of this block.
        scores: As in the forward pass.
        query_offset: As in the forward pass.
        dropout: As in the forward pass.
        backend: As in the forward pass.

    Returns:
        This block's part of dq, and the whole of its dk and dv, in the dtypes of q, k and v.

    Raises:
        KernelError: The scores have sinks.
    """
    call = AttentionCall(q, k, v, mask, scores, query_offset, dropout)
    _check_block(scores)
    return attention_backward.run(backend, call, dout, out, lse)


def _check_block(scores: Scores) -> None:
    if scores.sinks is not None:
        raise KernelError(
            "scores of a block have sinks, which would count in every block; merge them once, as "
            "a block with lse = sinks and out = 0, and pass scores.without_sinks()"
        )
