"""Mixture of experts: each token uses a few of many feed-forward layers (Shazeer et al. 2017).

    tokens of this rank -> router -> dispatch -> experts -> combine -> weighted sum

The tokens of a micro-batch are always divided over tensor-parallel ranks inside this layer, with
or without sequence parallelism. Each rank routes its own tokens, and the ranks of the experts
(``ep``, ``expert_tp``) need not be those of the dense layers. No token is dropped, so the output of
a token does not depend on other tokens, unless experts have a capacity (`ExpertCapacity`) or select
tokens.
"""

import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import permute, sort_by_expert, unpermute
from megatron_parallel import DropoutKey
from megatron_parallel.collectives import all_gather, gather_from_axis, scatter_to_axis
from megatron_parallel.expert_parallel import (
    Dispatch,
    ExpertRows,
    RowLimits,
    RowOps,
    assign_slots,
    build_dispatcher,
    uncompiled,
)
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.context import Context
from megatron_models.components.measure import counter_of
from megatron_models.components.mlp.module import MLP
from megatron_models.components.moe.capacity import ExpertCapacity
from megatron_models.components.moe.experts import Experts
from megatron_models.components.moe.losses import RouterLosses, routing_counts
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.routing import Routing
from megatron_models.components.moe.spec import MoESpec
from megatron_models.errors import ConfigError
from megatron_models.placement import Placement


class MoE(nn.Module):
    """The feed-forward layer of a mixture of experts.

    `Placement.dispatcher`, one of `megatron_parallel.expert_parallel.DISPATCHERS`, selects how
    tokens are sent to their experts.
    """

    def __init__(self, spec: MoESpec, layer: int, placement: Placement) -> None:
        super().__init__()
        mesh = placement.mesh
        self.spec, self.layer = spec, layer
        self.tp = mesh.axis("tp")
        self.sequence_parallel = placement.sequence_parallel
        ops = RowOps(sort_by_expert, placement.bind(permute), placement.bind(unpermute))
        self.dispatcher = build_dispatcher(
            placement.dispatcher,
            mesh,
            spec.num_experts,
            ops,
            rank_capacity_factor=spec.moe_expert_rank_capacity_factor or None,
        )
        self.losses = RouterLosses(spec, layer, mesh)
        self.router = Router(spec, layer, placement)
        self.capacity = ExpertCapacity(spec, mesh) if spec.moe_expert_capacity_factor else None
        self.experts = Experts(spec, placement)
        self.shared = None if spec.shared is None else MLP(spec.shared, layer, placement)
        self.shared_gate = None
        if spec.moe_shared_expert_gate:
            self.shared_gate = SharedExpertGate(spec, placement)

    def forward(self, x: Float[Tensor, "s b h"], context: Context) -> Float[Tensor, "s b h"]:
        """Returns the sum of the outputs of each token's experts.

        The shared expert computes while tokens are in flight, in both passes. With
        `Context.interleaver`, another micro-batch computes after it.

        Raises:
            ConfigError: Experts select tokens and there is a cache, or the experts to replay do not
                fit.
        """
        if self.spec.moe_router_expert_choice and context.cache is not None:
            raise ConfigError(
                "a model with moe_router_expert_choice cannot generate, since its experts select "
                "among all tokens of a sequence; leave out the cache"
            )
        cut = context.sequence_parallel
        if cut is None:
            cut = self.sequence_parallel
        tokens, routed, sequences = self._own_tokens(x, context.padding, cut)
        noise, replayed = self._noise(context, cut), self._replayed(x, context, cut)
        routing = self.router(tokens, routed, noise, replayed)
        experts, choices = routing.experts, routing.experts.shape[1]
        capacity = None if context.cache is not None else self.capacity  # decoding drops nothing
        shape = (x.shape[0] * (self.tp.size if cut else 1), x.shape[1])
        if capacity is not None:
            experts = capacity.limit(experts, routing.weights, shape, context)
        on_input = self.spec.moe_apply_probs_on_input  # each choice is then a token of its own
        # Before all that the experts do not need, so that the host waits for no number of rows.
        route = self.dispatcher.route(
            experts.view(-1, 1) if on_input else experts,
            self._limits(len(tokens), shape, capacity, routed is None and replayed is None),
        )
        self._record(routing.experts, x, context, cut)
        weights = self.losses.attach(routing, sequences, x.shape[1], context)
        self._count(routing, experts, route.overflow, context)
        if on_input:
            tokens = (tokens[:, None] * weights[..., None]).to(tokens.dtype).flatten(0, 1)
            weights = torch.ones_like(weights).view(-1, 1)
        size = None
        if capacity is not None and self.spec.moe_pad_expert_input_to_capacity:
            size = capacity.rows(shape)
        if route.changes:
            dispatch = uncompiled(route.dispatch, tokens, weights, context.interleaver)
            shared = self._shared_output(x, context)
            combined = uncompiled(self._combined, dispatch, size)
        else:
            dispatch = route.dispatch(tokens, weights, context.interleaver)
            shared = self._shared_output(x, context)
            combined = self._combined(dispatch, size)
        if on_input and choices > 1:
            combined = combined.view(-1, choices, combined.shape[1]).sum(1)
        y = self._all_tokens(combined, x, cut)
        return y if shared is None else y + shared

    def _limits(
        self,
        count: int,
        shape: tuple[int, int],
        capacity: ExpertCapacity | None,
        all_routed: bool,
    ) -> RowLimits:
        """Returns what the layer knows about the rows of experts.

        Args:
            count: Tokens of this rank.
            shape: Length of the sequence on all tensor-parallel ranks together, and sequences of
                the micro-batch.
            capacity: The capacity of experts, or None.
            all_routed: Whether no token is padding, and the router selects the experts.
        """
        if self.spec.moe_router_expert_choice:
            return RowLimits(self.router.largest_share(count))
        if capacity is None:
            return RowLimits(all_routed=all_routed)
        static = self.spec.moe_pad_expert_input_to_capacity
        return RowLimits(capacity.capacity(shape), static=static)

    def _combined(self, dispatch: Dispatch, size: int | None) -> Float[Tensor, "n h"]:
        """Returns the weighted sum of the outputs of each token's experts.

        Args:
            dispatch: The tokens in flight.
            size: Rows that each expert computes; None for those that it has.
        """
        rows = dispatch.wait()
        outputs = self.experts(*rows) if size is None else self._padded_outputs(rows, size)
        return dispatch.combine(outputs).wait()

    def _padded_outputs(self, rows: ExpertRows, size: int) -> Float[Tensor, "m h"]:
        """Returns the outputs of experts, each of which computes ``size`` rows.

        Rows of an expert are followed by copies of others. Nothing reads their outputs.
        """
        slots = assign_slots(rows.counts[:, None], len(rows.rows), size)
        sizes = torch.full_like(rows.counts, size)
        outputs: Tensor = self.experts(rows.rows.index_select(0, slots.source), sizes)
        return outputs.index_select(0, slots.place).masked_fill(~slots.sent[:, None], 0)

    def _shared_output(
        self, x: Float[Tensor, "s b h"], context: Context
    ) -> Float[Tensor, "s b h"] | None:
        """Returns the output of the shared expert, or None."""
        if self.shared is None:
            return None
        y: Tensor = self.shared(x, context)
        return y if self.shared_gate is None else y * self.shared_gate(x)

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

    def _own_rows(self, rows: Int[Tensor, "..."], cut: bool, fill: int) -> Int[Tensor, "..."]:
        """Returns this rank's part of rows that tensor-parallel ranks share, padded as tokens."""
        missing = 0 if cut else -len(rows) % self.tp.size
        if missing:
            rows = torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), fill)])
        return rows.chunk(self.tp.size)[self.tp.index]

    def _noise(self, context: Context, cut: bool) -> DropoutKey | None:
        """Returns the key of this rank's tokens for noise in training, or None."""
        if not (self.training and self.spec.moe_input_jitter_eps) or context.dropout is None:
            return None
        key = context.dropout.stream
        words = [word.flatten() for word in (key.word0, key.word1)]
        if not cut:  # the key of a cut sequence is this rank's
            words = [self._own_rows(word, cut, 0) for word in words]
        return DropoutKey(words[0][:, None], words[1][:, None])

    def _replayed(
        self, x: Float[Tensor, "part b h"], context: Context, cut: bool
    ) -> Int[Tensor, "n k"] | None:
        """Returns the experts to replay for this rank's tokens, or None."""
        replay = context.router_replay
        if replay is None or replay.recording:
            return None
        length, batch = x.shape[0] * (self.tp.size if cut else 1), x.shape[1]
        by_expert = self.spec.moe_router_expert_choice
        choices = self.spec.num_experts if by_expert else self.spec.moe_router_topk
        found = replay.experts_of(self.layer, (batch, length, choices)).to(x.device)
        return self._own_rows(found.transpose(0, 1).flatten(0, 1), cut, -1)

    def _record(
        self,
        experts: Int[Tensor, "n k"],
        x: Float[Tensor, "part b h"],
        context: Context,
        cut: bool,
    ) -> None:
        """Records the experts of the tokens of all tensor-parallel ranks."""
        replay = context.router_replay
        if replay is None or not replay.recording:
            return
        every = all_gather(experts, self.tp, purpose="recorded experts")
        length, batch = x.shape[0] * (self.tp.size if cut else 1), x.shape[1]
        rows = every[: length * batch].view(length, batch, -1)
        replay.record(self.layer, rows.transpose(0, 1).contiguous())

    def _count(
        self,
        routing: Routing,
        kept: Int[Tensor, "n k"],
        overflow: Int[Tensor, ""] | None,
        context: Context,
    ) -> None:
        """Counts the routing for reports, once in a pass."""
        collected = context.auxiliary_losses
        if collected is None or not collected.has_counters:
            return  # without the layer's number, for which compiled code would be compiled again
        name = counter_of(self.layer)
        if not collected.counts_under(name):
            return
        if self.layer not in context.counted_layers:
            function = self.spec.moe_router_score_function
            collected.count(name, routing_counts(routing, kept, overflow, function))
            context.counted_layers.add(self.layer)

    def _all_tokens(
        self, y: Float[Tensor, "n h"], like: Float[Tensor, "part b h"], cut: bool
    ) -> Float[Tensor, "part b h"]:
        """Returns the tokens in the shape of the residual stream."""
        if not cut:
            y = gather_from_axis(y, self.tp, dim=0)[: like.shape[0] * like.shape[1]]
        return y.view(like.shape)


class SharedExpertGate(nn.Module):
    """A learned gate of the shared expert: the sigmoid of a product with each token."""

    weight: Tensor

    def __init__(self, spec: MoESpec, placement: Placement) -> None:
        super().__init__()
        table = spec.shared_gate(placement.sequence_parallel)
        placement.register_parameters(self, table)

    def forward(self, x: Float[Tensor, "s b h"]) -> Float[Tensor, "s b 1"]:
        """Returns the gate of each token."""
        return torch.sigmoid(functional.linear(x, self.weight))
