"""The auxiliary losses of a router.

The load-balancing loss (Fedus et al. 2021, equations 4 to 6, with top-k routing as in Megatron-LM)
is ``E sum_e f_e P_e``. ``f_e`` is the fraction of all selections that chose expert ``e``, and
``P_e`` its mean probability: a softmax over all experts, or another score divided by the sum of all
scores. The loss is 1 for an even load. It counts the best experts of each token without biases and
groups, as in Megatron-LM. Its types differ in the tokens:

- ``aux_loss``: those of the micro-batch, on all its tensor- and context-parallel ranks.
- ``seq_aux_loss``: those of one sequence; the loss is the mean over sequences.
- ``global_aux_loss`` (Qiu et al. 2025): ``f_e`` is over the micro-batches of this step so far, on
  all data-parallel ranks too, and ``P_e`` over the micro-batch.

The z-loss (Zoph et al. 2022, equation 5) is the mean of the squared logsumexp of the logits.

All losses are attached as sums over tokens: the loss of a micro-batch times its number of tokens,
to be divided by the number of tokens of the global batch. Micro-batches with the same number of
tokens have the same weight, as in Megatron-LM; others are weighted by their tokens. Padding is not
counted.
"""

from typing import Final

import torch
from jaxtyping import Float, Float64, Int
from megatron_parallel import AuxiliaryLosses, Axis, Mesh, all_reduce
from torch import Tensor
from torch.nn import functional

from megatron_models.components.context import Context
from megatron_models.components.moe.router_fields import ScoreFunction
from megatron_models.components.moe.routing import Routing
from megatron_models.components.moe.selection import normalized, scores_of
from megatron_models.components.moe.spec import LOAD_BALANCING, Z_LOSS, MoESpec

_COUNTS: Final = "routing counts"


class RouterLosses:
    """The auxiliary losses of one layer's router.

    Args:
        spec: Description of the layer.
        layer: Global number of the layer.
        mesh: Mesh of this rank.
    """

    def __init__(self, spec: MoESpec, layer: int, mesh: Mesh) -> None:
        self.function: ScoreFunction = spec.moe_router_score_function
        self.coefficients = spec.balancing_losses
        self.z = spec.moe_z_loss_coeff
        self.layer = layer
        self.layers = spec.layers_with_experts or sum(spec.moe_layers)
        self.axis = mesh.axis("tp_cp" if mesh.layout.cp > 1 else "tp")
        self.data = mesh.axis("dp")

    def attach(
        self, routing: Routing, sequences: Int[Tensor, " n"], count: int, context: Context
    ) -> Float[Tensor, "n k"]:
        """Returns the combine weights with the losses attached, if the pass collects losses.

        Args:
            routing: Routing of this rank's tokens.
            sequences: Index of each token's sequence in the micro-batch.
            count: Sequences of the micro-batch.
            context: State of the pass.
        """
        weights = routing.weights  # of tokens that no other rank has, so nothing is replicated
        collected = context.auxiliary_losses
        if collected is None:
            return weights
        values: dict[str, tuple[Tensor, float]] = {}
        together = torch.zeros_like(sequences)
        for kind, coefficient in self.coefficients.items():
            groups = (sequences, count) if kind == "seq_aux_loss" else (together, 1)
            load = None
            if kind == "global_aux_loss":
                load = self._global_load(routing, context, collected)
            value = load_balancing_loss(routing, *groups, self.axis, self.function, load)
            values[LOAD_BALANCING[kind]] = value, coefficient
        if self.z:
            values[Z_LOSS] = z_loss(routing), self.z
        for name, (value, coefficient) in values.items():
            weights = collected.attach(
                weights, name, value / self.layers, coefficient * self.layers, replicated=()
            )
        return weights

    def _global_load(
        self, routing: Routing, context: Context, collected: AuxiliaryLosses
    ) -> Int[Tensor, "1 e"]:
        """Returns the selections of each expert in the micro-batches of this step so far.

        A recomputation reads what the forward pass counted.
        """
        if self.layer not in context.expert_loads:
            experts = routing.unrestricted_experts
            chosen = functional.one_hot(experts + 1, routing.logits.shape[1] + 1)[..., 1:]
            load = all_reduce(chosen.sum((0, 1)), self.axis, purpose=_COUNTS)
            load = all_reduce(load, self.data, purpose=_COUNTS)
            total = collected.running_sum(f"experts of layer {self.layer}", load)
            context.expert_loads[self.layer] = total
        return context.expert_loads[self.layer][None]


def load_balancing_loss(
    routing: Routing,
    groups: Int[Tensor, " n"],
    count: int,
    axis: Axis,
    function: ScoreFunction = "softmax",
    load: Int[Tensor, "groups e"] | None = None,
) -> Float[Tensor, ""]:
    """Returns this rank's share of the sum over groups of load-balancing loss times tokens.

    Args:
        routing: Routing of this rank's tokens.
        groups: Index of the group in which each token is balanced.
        count: Number of groups on all ranks.
        axis: Ranks with the other tokens of these groups.
        function: Function from logits to scores.
        load: Selections of each expert. Defaults to those of the tokens of the group.
    """
    experts, logits = routing.unrestricted_experts, routing.logits
    routed = (experts[:, :1] >= 0).to(logits.dtype)
    members = functional.one_hot(groups, count).t().to(logits.dtype)  # [groups, n]
    shares = scores_of(logits, function)
    if function != "softmax":
        shares = normalized(shares)
    probabilities = members @ (shares * routed)  # [groups, e]
    if load is None:
        choices = functional.one_hot(experts.clamp(min=0), logits.shape[1]).sum(1) * routed
        load = all_reduce((members @ choices).long(), axis, purpose=_COUNTS)
    total = load.sum(1, keepdim=True).clamp(min=1)  # selections of the group, k for each token
    return logits.shape[1] * (load.to(logits.dtype) / total * probabilities).sum()


def routing_counts(
    routing: Routing,
    kept: Int[Tensor, "n k"],
    overflow: Int[Tensor, ""] | None,
    function: ScoreFunction,
) -> Float64[Tensor, " counts"]:
    """Returns what `megatron_models.components.moe.measures` describes, for this rank's tokens.

    Args:
        routing: Routing of this rank's tokens.
        kept: Experts of the routing, with -1 for those that dropped the token.
        overflow: Selections beyond the bound of the dispatcher. None without a bound.
        function: Function from logits to scores.
    """
    logits, experts = routing.logits.detach(), routing.experts
    chosen = experts.new_zeros(logits.shape[1] + 1)
    chosen.index_add_(0, (experts + 1).flatten(), torch.ones_like(experts).flatten())
    shares = scores_of(logits, function)
    if function != "softmax":
        shares = normalized(shares)
    routed = routing.unrestricted_experts[:, :1] >= 0
    probabilities = shares.double().masked_fill(~routed, 0.0).sum(0)
    dropped = (experts >= 0).sum() - (kept >= 0).sum()
    beyond = torch.zeros_like(dropped) if overflow is None else overflow
    numbers = torch.stack([dropped, beyond]).double()
    return torch.cat([chosen[1:].double(), probabilities, numbers])


def z_loss(routing: Routing) -> Float[Tensor, ""]:
    """Returns the sum over this rank's tokens of the squared logsumexp of their logits."""
    routed = (routing.unrestricted_experts[:, 0] >= 0).to(routing.logits.dtype)
    return (torch.logsumexp(routing.logits, -1).square() * routed).sum()
