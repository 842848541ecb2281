"""How a router scores experts and selects those of each token, as functions of its logits.

Indices are of experts, best first; -1 stands for no expert. Functions with an ``axis`` select over
the tokens of the whole micro-batch, which the ranks of the axis share.
"""

from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from megatron_parallel import Axis, all_reduce
from megatron_parallel.collectives import all_gather
from torch import Tensor
from torch.nn import functional

from megatron_models.components.moe.router_fields import ScoreFunction

SMALL: Final = 1e-20
"""Keeps a quotient of scores finite, as in Megatron-LM."""

_SINKHORN_TOLERANCE: Final = 1e-4
_SINKHORN_SMALL: Final = 1e-8
_SINKHORN_ROUNDS: Final = 1000


class Groups(NamedTuple):
    """Groups of experts of which a token uses some.

    Attributes:
        number: Number of groups; each has equally many successive experts.
        chosen: Groups of a token.
        best: Best experts of a group whose scores are summed to that of the group.
    """

    number: int
    chosen: int
    best: int


def scores_of(logits: Float[Tensor, "n e"], function: ScoreFunction) -> Float[Tensor, "n e"]:
    """Returns the scores of all experts, between 0 and 1, or for ``sqrtsoftplus`` from 0."""
    if function == "softmax":
        return torch.softmax(logits, -1)
    if function == "sigmoid":
        return torch.sigmoid(logits)
    return functional.softplus(logits).sqrt()


def normalized(scores: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Returns scores divided by their sum over experts."""
    return scores / (scores.sum(1, True) + SMALL)


def best_experts(
    ranking: Float[Tensor, "n e"], top_k: int, groups: Groups | None = None
) -> Int[Tensor, "n k"]:
    """Returns the experts of each token with the highest ranking, in its best groups.

    The score of a group is the sum of the ranking of its best experts (DeepSeek-AI 2024, section
    2.1.2), or with one expert the maximum (DeepSeek-V2, section 2.2.2).
    """
    ranking = ranking.detach()
    if groups is not None:
        grouped = ranking.view(len(ranking), groups.number, -1)
        scores = grouped.topk(groups.best, -1).values.sum(-1)
        chosen = scores.topk(groups.chosen, -1).indices
        outside = torch.ones_like(scores, dtype=torch.bool).scatter(1, chosen, False)
        ranking = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    return ranking.topk(top_k, -1).indices


def balanced_experts(
    count: int, top_k: int, num_experts: int, first: int, device: torch.device | str = "cpu"
) -> Int[Tensor, "n k"]:
    """Returns experts in turn, for benchmarks: token ``i`` has ``i k, ..., i k + k - 1``.

    Args:
        count: Number of tokens.
        top_k: Experts of each token.
        num_experts: Number of experts; numbers are modulo it.
        first: Index of the first token.
        device: Device of the result.
    """
    numbers = torch.arange(first * top_k, (first + count) * top_k, device=device) % num_experts
    return numbers.view(count, top_k)


def sinkhorn(
    logits: Float[Tensor, "n e"], routed: Bool[Tensor, " n"], axis: Axis
) -> Float[Tensor, "n e"]:
    """Returns probabilities that are even over tokens and over experts.

    They are the exponentials of the logits, times a factor for each token and one for each expert
    (Clark et al. 2022, section 3.2; Megatron-Core's ``sinkhorn``).

    Args:
        logits: Logits of this rank's tokens.
        routed: False for padding, which has probability 0.
        axis: Ranks with the other tokens of the micro-batch.
    """
    logits = logits.detach()
    # The factor of a token absorbs its maximum, without which large logits would overflow.
    cost = (logits - logits.amax(1, True)).exp() * routed[:, None]
    tokens = all_reduce(routed.sum().to(cost.dtype), axis, purpose="routed tokens").clamp(min=1)
    experts = logits.shape[1]
    of_expert = torch.ones_like(cost[0])
    of_token = torch.ones_like(cost[:, 0])
    for _ in range(_SINKHORN_ROUNDS):
        before = of_expert
        of_token = 1 / (tokens * ((cost * of_expert).sum(1) + _SINKHORN_SMALL))
        load = all_reduce((of_token[:, None] * cost).sum(0), axis, purpose="Sinkhorn loads")
        of_expert = 1 / (experts * (load + _SINKHORN_SMALL))
        if float((before - of_expert).abs().mean()) <= _SINKHORN_TOLERANCE:
            break
    return of_expert * cost * of_token[:, None]


def tokens_of_experts(
    scores: Float[Tensor, "n e"], routed: Bool[Tensor, " n"], top_k: int, axis: Axis
) -> Int[Tensor, "n e"]:
    """Returns the experts that select each token, each its best tokens of the micro-batch.

    An expert selects ``k / e`` of the tokens, rounded up (Zhou et al. 2022, section 3.2).

    Args:
        scores: Scores of all experts for this rank's tokens.
        routed: False for padding, which no expert selects.
        top_k: Mean number of experts of a token.
        axis: Ranks with the other tokens of the micro-batch.

    Returns:
        Expert ``e`` in column ``e`` if it selects the token, else -1.
    """
    count, experts = scores.shape
    known = scores.detach().masked_fill(~routed[:, None], -torch.inf)
    known = all_gather(known, axis, purpose="scores of experts")
    real = known[:, :1] > -torch.inf
    # The number of tokens without padding stays on the device; the host knows that of all tokens.
    best = known.topk(expert_share(len(known), top_k, experts), 0).indices
    share = (real.sum() * top_k + experts - 1) // experts
    within = (torch.arange(len(best), device=scores.device) < share)[:, None].expand_as(best)
    chosen = torch.zeros_like(known, dtype=torch.bool).scatter(0, best, within) & real
    own = chosen[count * axis.index : count * (axis.index + 1)]
    return torch.arange(experts, device=scores.device).where(own, -1)


def expert_share(tokens: int, top_k: int, experts: int) -> int:
    """Returns the tokens that each of the experts selects: ``top_k / experts`` of them."""
    return min(-(-tokens * top_k // experts), tokens)
