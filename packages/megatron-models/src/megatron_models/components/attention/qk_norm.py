"""Norms of queries and keys, of each head or of whole projections."""

from typing import Any

import torch
from jaxtyping import Float
from megatron_parallel import Axis
from megatron_parallel.collectives import all_reduce
from torch import Tensor
from torch.autograd import Function

from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_models.components.norm.module import Norm
from megatron_models.placement import Placement


class QKNorm(Norm):
    """The norm of a tensor-parallel rank's queries or keys ``[s, b, n, d]``.

    Args:
        spec: The norm.
        placement: Mesh, dtype and device.
        first_head: Number of the rank's first head.
        sharing_ranks: Number of ranks that hold the same heads.
    """

    def __init__(
        self, spec: QKNormSpec, placement: Placement, first_head: int, sharing_ranks: int
    ) -> None:
        super().__init__(spec, placement)
        self.tp = placement.mesh.axis("tp")
        self.first_head = first_head
        #: Channels over which squares are summed, those of shared heads once for each rank.
        self.channels = spec.hidden_size * sharing_ranks if spec.whole else 0

    def forward(self, x: Float[Tensor, "s b n d"]) -> Float[Tensor, "s b n d"]:
        """Normalizes each head, or all heads of all ranks together."""
        if not self.channels:
            return super().forward(x)
        heads, width = x.shape[2:]
        weight = self.weight.narrow(0, self.first_head * width, heads * width).view(heads, width)
        result: Tensor = _RMSNormOverRanks.apply(  # type: ignore[no-untyped-call]
            x, weight, self.epsilon, self.zero_centered, self.channels, self.tp
        )
        return result


class _RMSNormOverRanks(Function):
    """RMSNorm whose mean square covers the heads of all ranks of an axis.

    Both passes all-reduce one number for each token. Statistics are in at least float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        epsilon: float,
        zero_centered: bool,
        channels: int,
        axis: Axis,
    ) -> Tensor:
        squares = _over_ranks(_wide(x).square(), axis)
        inverse = torch.rsqrt(squares / channels + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        ctx.zero_centered, ctx.channels, ctx.axis = zero_centered, channels, axis
        normed = (_wide(x) * inverse * _gain(weight, zero_centered)).to(x.dtype)
        # torch 2.11 compiles a function without gradients if `.to` has no effect on its result.
        return normed.view_as(normed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad, normal = _wide(grads[0]), _wide(x) * inverse
        of_weight = (grad * normal).sum((0, 1)).to(weight.dtype)
        grad = grad * _gain(weight, ctx.zero_centered)
        along = _over_ranks(grad * normal, ctx.axis) / ctx.channels
        return (inverse * (grad - normal * along)).to(x.dtype), of_weight, None, None, None, None


def _over_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Returns the sum over all heads of all ranks, ``[s, b, 1, 1]``."""
    return all_reduce(x.sum((-2, -1), keepdim=True), axis)


def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return 1.0 + _wide(weight) if zero_centered else _wide(weight)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
