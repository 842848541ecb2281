"""What a report shows of the routing of a layer. Importing this module does not import torch.

A layer counts, over all tokens of a step that are no padding:

- the selections of each expert, those included that a capacity drops,
- the sum of the probabilities of each expert: a softmax over all experts, or another score divided
  by the sum of all scores, as in load-balancing losses,
- the selections that a capacity dropped,
- the selections beyond the bound of rows (``moe_expert_rank_capacity_factor``), which make the step
  invalid.

The measures are those of the whole step, since a mean over micro-batches of the largest load would
depend on their number.
"""

import math
from collections.abc import Sequence

from megatron_models.components.measure import Measure

EXPERT_LOAD = "moe/expert_load"
ROUTER_ENTROPY = "moe/router_entropy"
DROPPED_SHARE = "moe/dropped_share"
OVERFLOW = "moe/overflow"
_REMEDY = (
    "raise --moe-expert-rank-capacity-factor, which limits the rows of experts, or leave it out"
)


def routing_measures(counts: Sequence[float], experts: int) -> tuple[Measure, ...]:
    """Returns the measures of one layer.

    - `EXPERT_LOAD`: selections of the expert with the most, divided by the mean of all experts; 1
      for an even load, at most the number of experts.
    - `ROUTER_ENTROPY`: entropy of the mean probabilities, divided by that of equal probabilities;
      1 if the experts are equally probable, 0 if one has the probability 1 for all tokens.
    - `DROPPED_SHARE`: share of selections that were dropped.
    - `OVERFLOW`: selections beyond the bound, only if there are any.

    Args:
        counts: Values of `routing_counts`, summed.
        experts: Number of experts.
    """
    load, probabilities = counts[:experts], counts[experts : 2 * experts]
    dropped, beyond = counts[2 * experts :]
    selections, total = sum(load), sum(probabilities)
    found = {"load": math.nan, "entropy": math.nan, "dropped": math.nan}
    if selections:
        found["load"] = max(load) * experts / selections
        found["dropped"] = dropped / selections
    if total and math.isfinite(total):
        shares = [p / total for p in probabilities if p > 0]
        entropy = -sum(share * math.log(share) for share in shares)
        found["entropy"] = entropy / math.log(experts) if experts > 1 else 1.0
    measures: tuple[Measure, ...] = (
        Measure(EXPERT_LOAD, "expert load", found["load"], "largest"),
        Measure(ROUTER_ENTROPY, "router entropy", found["entropy"], "smallest"),
        Measure(DROPPED_SHARE, "dropped share", found["dropped"], "largest"),
    )
    if beyond:
        measures += (Measure(OVERFLOW, "selections without room", beyond, "largest", _REMEDY),)
    return measures
