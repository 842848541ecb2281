"""The router of a mixture of experts.

    logits = W x (+ b)  ->  scores of all experts  ->  selection  ->  weights of a token's experts

Logits, scores and weights are float32, or float64 in a float64 model, independent of the model's
precision, since a rounding error sends a token to another expert. With ``moe_router_dtype`` fp64
logits and scores are float64.

With softmax scores, weights are a softmax over the selected logits, or with ``pre_softmax`` the
selected entries of a softmax over all. With sigmoid scores (DeepSeek-AI 2024, section 2.1.2) they
are the scores of a token's experts divided by their sum. A factor then scales the weights.

A token uses its best experts. Groups limit them to the experts of its best groups. An expert may
have a bias that affects the selection only (Wang et al. 2024): after each step it falls by a
constant if the expert had more tokens than the mean, and rises if it had fewer. Padding is not
routed.
"""

import torch
from jaxtyping import Bool, Float, Int
from megatron_parallel import DropoutKey, keyed_uniform
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.dropout_sites import ROUTER_INPUT
from megatron_models.components.moe.routing import Routing
from megatron_models.components.moe.selection import (
    Groups,
    balanced_experts,
    best_experts,
    expert_share,
    normalized,
    scores_of,
    sinkhorn,
    tokens_of_experts,
)
from megatron_models.components.moe.spec import EXPERT_BIAS, MoESpec
from megatron_models.placement import Placement


class Router(nn.Module):
    """Scores experts, selects those of each token, and weights them.

    The tokens of a micro-batch are divided over tensor-parallel ranks, with or without sequence
    parallelism, so the gradient of the weight is always a partial sum over them.

    Args:
        spec: Description of the layer.
        layer: Global number of the layer.
        placement: Mesh, dtype, device and options.
    """

    weight: Tensor
    bias: Tensor | None
    expert_bias: Tensor

    def __init__(self, spec: MoESpec, layer: int, placement: Placement) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.dropout_layer: int | Tensor = layer
        self.groups = None
        if spec.moe_router_num_groups:
            self.groups = Groups(
                spec.moe_router_num_groups,
                spec.moe_router_group_topk,
                spec.moe_router_group_score_topk,
            )
        self.weights_dtype = torch.float64 if placement.dtype == torch.float64 else torch.float32
        self.dtype = torch.float64 if spec.moe_router_dtype == "fp64" else self.weights_dtype
        mesh = placement.mesh
        self.tp = mesh.axis("tp")
        self.tokens_axis = mesh.axis("tp_cp" if mesh.layout.cp > 1 else "tp")
        placement.register_parameters(self, spec.router(), "weight", "bias")
        self.load = placement.register_state(
            self, spec.state(), f"router.{EXPERT_BIAS}", self.update_bias
        )

    def forward(
        self,
        x: Float[Tensor, "n h"],
        routed: Bool[Tensor, " n"] | None,
        noise: DropoutKey | None = None,
        replayed: Int[Tensor, "n k"] | None = None,
    ) -> Routing:
        """Selects the experts of each token.

        Args:
            x: Tokens of this rank.
            routed: False for padding. Defaults to no padding.
            noise: Key ``[n, 1]`` of the noise on the inputs. Defaults to no noise.
            replayed: Experts to select instead of the best. Defaults to none.
        """
        x, bias = x.to(self.dtype), self.bias
        if noise is not None:
            x = x * self._jitter(x, noise)
        logits = functional.linear(
            x, self.weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        )
        scores = logits
        if not self.spec.softmax_of_selected:
            scores = scores_of(logits, self.spec.moe_router_score_function)
        unrestricted = best_experts(scores, self.spec.moe_router_topk)
        experts = replayed
        if experts is None:
            experts = self._select(logits, scores, unrestricted, routed)
        weights = self._weigh(scores, experts if replayed is None else experts.clamp(min=0))
        if routed is not None:
            experts = experts.masked_fill(~routed[:, None], -1)
            unrestricted = unrestricted.masked_fill(~routed[:, None], -1)
        if self.load is not None:
            chosen = functional.one_hot(experts + 1, logits.shape[1] + 1)[..., 1:]
            weights = self.load.observe(weights, chosen.sum((0, 1)))
        return Routing(experts, weights, logits, unrestricted)

    def _select(
        self,
        logits: Float[Tensor, "n e"],
        scores: Float[Tensor, "n e"],
        best: Int[Tensor, "n k"],
        routed: Bool[Tensor, " n"] | None,
    ) -> Int[Tensor, "n selected"]:
        """Returns the experts of each token; ``best`` are those without biases and groups."""
        spec, count = self.spec, len(logits)
        if routed is None:
            routed = torch.ones(count, dtype=torch.bool, device=logits.device)
        if spec.moe_router_force_load_balancing:
            first = count * self.tp.index
            sizes = (count, spec.moe_router_topk, spec.num_experts)
            return balanced_experts(*sizes, first, logits.device)
        if spec.moe_router_expert_choice:
            return tokens_of_experts(scores, routed, spec.moe_router_topk, self.tokens_axis)
        if self.training and spec.moe_router_load_balancing_type == "sinkhorn":
            even = sinkhorn(logits, routed, self.tokens_axis)
            return best_experts(even, spec.moe_router_topk)
        if self.load is None and self.groups is None:
            return best
        ranking = scores if self.load is None else scores + self.expert_bias
        return best_experts(ranking, spec.moe_router_topk, self.groups)

    def largest_share(self, count: int) -> int:
        """Returns the largest number of tokens of a micro-batch that an expert selects.

        Args:
            count: Tokens of this rank.
        """
        tokens = count * self.tokens_axis.size
        return expert_share(tokens, self.spec.moe_router_topk, self.spec.num_experts)

    def _weigh(
        self, scores: Float[Tensor, "n e"], experts: Int[Tensor, "n k"]
    ) -> Float[Tensor, "n k"]:
        """Returns the weights of each token's experts from the scores of all, without biases."""
        spec = self.spec
        chosen = experts.clamp(min=0) if spec.moe_router_expert_choice else experts
        if torch.compiler.is_compiling():
            # The backward pass of a gather adds to zeros, which generated code of torch 2.13 for a
            # CPU may read before they are added to.
            every = torch.arange(scores.shape[1], device=scores.device)
            weights = torch.where(chosen[..., None] == every, scores[:, None], 0.0).sum(-1)
        else:
            weights = scores.gather(1, chosen)
        if spec.softmax_of_selected:
            weights = torch.softmax(weights, -1)
        elif spec.normalizes_weights:
            weights = normalized(weights)
        factor = spec.moe_router_topk_scaling_factor
        return (weights if factor == 1 else weights * factor).to(self.weights_dtype)

    def _jitter(self, x: Float[Tensor, "n h"], key: DropoutKey) -> Float[Tensor, "n h"]:
        """Returns factors between 1 - eps and 1 + eps (Fedus et al. 2021, section 2.4)."""
        eps = self.spec.moe_input_jitter_eps
        shape = (len(x), 1, x.shape[1])
        number = self.dropout_layer
        noise = keyed_uniform(shape, key, layer=number, site=ROUTER_INPUT, dtype=x.dtype)
        return 1 + eps * (2 * noise[:, 0] - 1)

    def update_bias(self, bias: Tensor, tokens: Tensor) -> Tensor:
        """Returns the biases of experts ``[e]`` after a step in which they had ``tokens`` each."""
        rate = self.spec.moe_router_bias_update_rate
        return bias + rate * torch.sign(tokens.mean() - tokens).to(bias.dtype)
