"""The router of a mixture of experts, and its auxiliary losses.

Logits and softmax are float32, or float64 in a float64 model, independent of the model's precision,
since a rounding error sends a token to another expert.

The load-balancing loss of a micro-batch (Fedus et al. 2021, equations 4 to 6, with top-k routing as
in Megatron-LM) is ``E sum_e f_e P_e``. ``f_e`` is the fraction of all selections that chose expert
``e``, and ``P_e`` its mean probability, by a softmax over all experts. Both are over the tokens of
the *micro-batch* on all its tensor- and context-parallel ranks, so counts are summed over these
ranks. The loss is 1 for an even load. ``seq_aux_loss`` is computed for each sequence. The z-loss
(Zoph et al. 2022, equation 5) is the mean of the squared logsumexp of the logits.

With sigmoid scores (DeepSeek-AI 2024, section 2.1.2), ``P_e`` is a score divided by the sum of all
scores, and the weights of a token's experts are their scores divided by the sum of the selected
ones. An expert may then have a bias that affects the selection only (Wang et al. 2024). After each
step it falls by a constant if the expert had more tokens than the mean, and rises if it had fewer.
The loss counts the selections without the bias, as in Megatron-LM.

Both losses are attached as sums over tokens: the loss of a micro-batch times its number of tokens,
to be divided by the number of tokens of the global batch. Micro-batches with the same number of
tokens have the same weight, as in Megatron-LM; others are weighted by their tokens. Padding is
neither routed nor counted.
"""

from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from megatron_parallel import AuxiliaryLosses, Axis, Mesh, all_reduce
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.moe.spec import EXPERT_BIAS, LOAD_BALANCING, Z_LOSS, MoESpec
from megatron_models.placement import Placement

SMALL: Final = 1e-20
"""Keeps a quotient of scores finite, as in Megatron-LM."""


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: Numbers of the experts ``[n, k]``, best first; -1 for padding.
        weights: Weights of the experts' outputs ``[n, k]``, float32 or float64.
        logits: Logits of all experts ``[n, e]``, of the same dtype.
        unbiased_experts: Numbers of the experts without biases ``[n, k]``, which the loss counts.
    """

    experts: Int[Tensor, "n k"]
    weights: Float[Tensor, "n k"]
    logits: Float[Tensor, "n e"]
    unbiased_experts: Int[Tensor, "n k"]


class Router(nn.Module):
    """Top-k routing without dropping.

    The tokens of a micro-batch are divided over tensor-parallel ranks, with or without sequence
    parallelism, so the gradient of the weight is always a partial sum over them.
    """

    weight: Tensor
    expert_bias: Tensor

    def __init__(self, spec: MoESpec, placement: Placement) -> None:
        super().__init__()
        self.top_k = spec.moe_router_topk
        self.pre_softmax = spec.moe_router_pre_softmax
        self.sigmoid = spec.moe_router_score_function == "sigmoid"
        self.rate = spec.moe_router_bias_update_rate
        placement.register_parameters(self, spec.router())
        self.load = placement.register_state(
            self, spec.state(), f"router.{EXPERT_BIAS}", self.update_bias
        )

    def forward(self, x: Float[Tensor, "n h"], routed: Bool[Tensor, " n"] | None) -> Routing:
        """Selects the experts of each token; ``routed`` is False for padding."""
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = functional.linear(x.to(exact), self.weight.to(exact))
        weights, experts, unbiased_experts = self._choose(logits)
        if routed is not None:
            experts = experts.masked_fill(~routed[:, None], -1)
            unbiased_experts = unbiased_experts.masked_fill(~routed[:, None], -1)
        if self.load is not None:
            chosen = functional.one_hot(experts + 1, logits.shape[1] + 1)[..., 1:]
            weights = self.load.observe(weights, chosen.sum((0, 1)))
        return Routing(experts, weights, logits, unbiased_experts)

    def _choose(
        self, logits: Float[Tensor, "n e"]
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Returns weights and numbers of each token's experts, and the numbers without biases."""
        if self.sigmoid:
            scores = torch.sigmoid(logits)
            chosen, unbiased_experts = torch.topk(scores, self.top_k)
            experts = unbiased_experts
            if self.load is not None:
                experts = torch.topk(scores + self.expert_bias, self.top_k).indices
                chosen = scores.gather(1, experts)
            weights = chosen if self.top_k == 1 else chosen / (chosen.sum(1, True) + SMALL)
            return weights, experts, unbiased_experts
        if self.pre_softmax:
            weights, experts = torch.topk(torch.softmax(logits, -1), self.top_k)
        else:
            chosen, experts = torch.topk(logits, self.top_k)
            weights = torch.softmax(chosen, -1)
        return weights, experts, experts

    def update_bias(self, bias: Tensor, tokens: Tensor) -> Tensor:
        """Returns the biases of experts ``[e]`` after a step in which they had ``tokens`` each."""
        return bias + self.rate * torch.sign(tokens.mean() - tokens).to(bias.dtype)


class RouterLosses:
    """The auxiliary losses of one layer's router."""

    def __init__(self, spec: MoESpec, mesh: Mesh) -> None:
        self.sigmoid = spec.moe_router_score_function == "sigmoid"
        self.by_sequence = spec.moe_router_load_balancing_type == "seq_aux_loss"
        self.balance, self.z = spec.moe_aux_loss_coeff, spec.moe_z_loss_coeff
        self.layers = sum(spec.moe_layers)
        self.axis = mesh.axis("tp_cp" if mesh.layout.cp > 1 else "tp")

    def attach(
        self,
        routing: Routing,
        sequences: Int[Tensor, " n"],
        count: int,
        auxiliary_losses: AuxiliaryLosses,
    ) -> Float[Tensor, "n k"]:
        """Returns the combine weights with the losses attached.

        Args:
            routing: Routing of this rank's tokens.
            sequences: Index of each token's sequence in the micro-batch.
            count: Sequences of the micro-batch.
            auxiliary_losses: Collects the losses; it reports their mean over layers.
        """
        weights = routing.weights  # of tokens that no other rank has, so nothing is replicated
        if self.balance:
            if not self.by_sequence:
                sequences, count = torch.zeros_like(sequences), 1
            value = load_balancing_loss(routing, sequences, count, self.axis, self.sigmoid)
            value = value / self.layers
            factor = self.balance * self.layers
            weights = auxiliary_losses.attach(weights, LOAD_BALANCING, value, factor, replicated=())
        if self.z:
            value = z_loss(routing) / self.layers
            weights = auxiliary_losses.attach(
                weights, Z_LOSS, value, self.z * self.layers, replicated=()
            )
        return weights


def load_balancing_loss(
    routing: Routing,
    groups: Int[Tensor, " n"],
    count: int,
    axis: Axis,
    sigmoid: bool = False,
) -> Float[Tensor, ""]:
    """Returns this rank's share of the sum over groups of load-balancing loss times tokens.

    Args:
        routing: Routing of this rank's tokens.
        groups: Index of the group in which each token is balanced.
        count: Number of groups on all ranks.
        axis: Ranks with the other tokens of these groups.
        sigmoid: Whether scores are sigmoids of logits instead of their softmax.
    """
    experts, logits = routing.unbiased_experts, routing.logits
    routed = (experts[:, :1] >= 0).to(logits.dtype)
    members = functional.one_hot(groups, count).t().to(logits.dtype)  # [groups, n]
    probabilities = members @ (_shares(logits, sigmoid) * routed)  # [groups, e]
    choices = functional.one_hot(experts.clamp(min=0), logits.shape[1]).sum(1) * routed
    counts = all_reduce((members @ choices).long(), axis, purpose="routing counts")
    total = counts.sum(1, keepdim=True).clamp(min=1)  # selections of the group, k for each token
    shares = counts.to(logits.dtype) / total
    return logits.shape[1] * (shares * probabilities).sum()


def _shares(logits: Float[Tensor, "n e"], sigmoid: bool) -> Float[Tensor, "n e"]:
    """Returns scores of all experts, normalized to a sum of 1."""
    if not sigmoid:
        return torch.softmax(logits, -1)
    scores = torch.sigmoid(logits)
    return scores / (scores.sum(1, True) + SMALL)


def z_loss(routing: Routing) -> Float[Tensor, ""]:
    """Returns the sum over this rank's tokens of the squared logsumexp of their logits."""
    routed = (routing.experts[:, 0] >= 0).to(routing.logits.dtype)
    return (torch.logsumexp(routing.logits, -1).square() * routed).sum()
