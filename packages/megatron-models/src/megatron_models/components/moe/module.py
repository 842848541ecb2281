"""Mixture of experts: each token uses a few of many feed-forward layers (Shazeer et al. 2017).

    tokens of this rank -> router -> dispatch -> experts -> combine -> weighted sum

The tokens of a micro-batch are always divided over tensor-parallel ranks inside this layer, with
or without sequence parallelism. Each rank routes its own tokens, and the ranks of the experts
(``ep``, ``expert_tp``) need not be those of the dense layers. No token is dropped, so the output of
a token does not depend on other tokens.
"""

import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import permute, sort_by_expert, unpermute
from megatron_parallel.collectives import gather_from_axis, scatter_to_axis
from megatron_parallel.expert_parallel import RowOps, build_dispatcher
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.context import Context
from megatron_models.components.mlp.module import MLP
from megatron_models.components.moe.experts import Experts
from megatron_models.components.moe.router import Router, RouterLosses
from megatron_models.components.moe.spec import MoESpec
from megatron_models.placement import Placement


class MoE(nn.Module):
    """The feed-forward layer of a mixture of experts.

    `Placement.dispatcher`, one of `megatron_parallel.expert_parallel.DISPATCHERS`, selects how
    tokens are sent to their experts.
    """

    def __init__(self, spec: MoESpec, layer: int, placement: Placement) -> None:
        super().__init__()
        mesh = placement.mesh
        self.tp = mesh.axis("tp")
        self.sequence_parallel = placement.sequence_parallel
        ops = RowOps(sort_by_expert, permute, unpermute)
        self.dispatcher = build_dispatcher(placement.dispatcher, mesh, spec.num_experts, ops)
        self.losses = RouterLosses(spec, mesh)
        self.router = Router(spec, placement)
        self.experts = Experts(spec, placement)
        self.shared = None if spec.shared is None else MLP(spec.shared, layer, placement)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the sum of the outputs of each token's experts.

        The shared expert computes while tokens are in flight, in both passes. With
        `Context.interleaver`, another micro-batch computes after it.
        """
        cut = context.sequence_parallel
        if cut is None:
            cut = self.sequence_parallel
        tokens, routed, sequences = self._own_tokens(x, context.padding, cut)
        routing = self.router(tokens, routed)
        weights = routing.weights
        if context.auxiliary_losses is not None:
            weights = self.losses.attach(routing, sequences, x.shape[1], context.auxiliary_losses)
        dispatch = self.dispatcher.dispatch(tokens, routing.experts, weights, context.interleaver)
        shared = None if self.shared is None else self.shared(x, context)
        outputs = self.experts(*dispatch.wait())
        y = self._all_tokens(dispatch.combine(outputs).wait(), x, cut)
        return y if shared is None else y + shared

    def _own_tokens(
        self, x: Float[Tensor, "part b h"], padding: Bool[Tensor, "s b"] | None, cut: bool
    ) -> tuple[Float[Tensor, "n h"], Bool[Tensor, " n"] | None, Int[Tensor, " n"]]:
        """Returns this rank's tokens, whether they are routed, and the sequence of each.

        If the sequence is not ``cut``, all tensor-parallel ranks hold the same tokens. Each takes
        its part, and the last parts are padded with tokens that are not routed.
        """
        batch, flat = x.shape[1], x.flatten(0, 1)
        routed = None if padding is None else ~padding.flatten()
        count = len(flat)
        if not cut and self.tp.size > 1:
            missing = -count % self.tp.size
            if missing and routed is None:
                routed = torch.ones(count, dtype=torch.bool, device=x.device)
            if missing and routed is not None:
                flat = functional.pad(flat, (0, 0, 0, missing))
                routed = functional.pad(routed, (0, missing), value=False)
            flat = scatter_to_axis(flat, self.tp, dim=0)
            count = len(flat)
        start = count * self.tp.index
        if routed is not None:
            routed = routed[start : start + count]
        sequences = torch.arange(start, start + count, device=x.device) % batch
        return flat, routed, sequences

    def _all_tokens(
        self, y: Float[Tensor, "n h"], like: Float[Tensor, "part b h"], cut: bool
    ) -> Float[Tensor, "part b h"]:
        """Returns the tokens in the shape of the residual stream."""
        if not cut:
            y = gather_from_axis(y, self.tp, dim=0)[: like.shape[0] * like.shape[1]]
        return y.view(like.shape)
