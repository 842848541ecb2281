"""Bytes of activations that a layer with experts saves for its backward pass, on one rank.

Each of ``t`` tensor-parallel ranks routes ``n = s b / t`` tokens of its own. The experts are
divided over ``ep`` ranks, and each expert's matrices are cut over ``expert_tp`` ranks. All-gather
brings all ``n ep expert_tp`` tokens of these ranks to each rank; all-to-all brings only the rows of
the rank's own experts.

By all-to-all a rank computes ``n k expert_tp`` rows under an even load, where ``k`` is the number
of experts of a token. With ``ep = 1`` that is exact; otherwise it is the mean over the ranks of
``ep``. By all-gather, and with room for a number of rows that the host knows, a rank saves the
largest possible number of rows (`megatron_parallel.expert_parallel.dispatch`), so the bytes are
those of every load.
"""

from math import ceil
from typing import Final, NamedTuple

from megatron_models.components.mixer import BytesByPart, ExpertParallelism, LayerPass
from megatron_models.components.moe.config import MoEConfig

_INDEX: Final = 8
_OFFSET: Final = 4
_FP32: Final = 4


class _Rows(NamedTuple):
    """Rows on one rank.

    Attributes:
        received: Rows of its experts, with those of no expert.
        computed: Rows that its experts compute.
        slots: Rows that it sends if their number is fixed, or None.
        has_tail: Whether rows of no expert follow the others.
    """

    received: int
    computed: int
    slots: int | None
    has_tail: bool


def _rows(config: MoEConfig, tokens: int, own: int, ranks: ExpertParallelism, cut: int) -> _Rows:
    """Returns the rows of a micro-batch of ``tokens``, of which a rank has ``own``."""
    choices, local = config.moe_router_topk, config.num_experts // ranks.ep
    mean = own * choices * cut
    padded = config.moe_pad_expert_input_to_capacity
    gathers = ranks.dispatcher == "allgather" or ranks.ep == cut == 1
    limits, even = [], 0
    if factor := config.moe_expert_capacity_factor:
        even = ceil(mean * factor)
        limits.append(even)
    if factor := config.moe_expert_rank_capacity_factor:
        limits.append(ceil(mean * factor))
    slots = None
    if gathers:
        received = min([own * cut * ranks.ep * min(choices, local), *limits])
    elif padded or config.moe_expert_rank_capacity_factor:
        slots = own * min(choices, local)
        if padded:
            slots = min(slots, local * config.expert_capacity(tokens, choices, config.num_experts))
        if factor := config.moe_expert_rank_capacity_factor:
            slots = min(slots, ceil(own * choices * factor / ranks.ep))
        slots *= ranks.ep
        received = slots * cut
    else:
        received = min([mean, *limits])
    has_tail = not padded and (slots is not None or (gathers and ranks.ep > 1))
    return _Rows(received, even if padded else received, slots, has_tail)


def expert_activations(config: MoEConfig, layer_pass: LayerPass) -> BytesByPart:
    """Returns the bytes that routing, dispatch and experts save, by submodule.

    The input of the layer and the losses of the router are left out.
    """
    tokens, size, tp, ranks = (
        layer_pass.tokens,
        layer_pass.saved_bytes.activation,
        layer_pass.tp,
        layer_pass.experts,
    )
    cut = tp if ranks.expert_tp is None else ranks.expert_tp
    parts = ranks.ep * cut
    hidden, choices = config.hidden_size, config.moe_router_topk
    wide = max(size, _FP32)  # routing and weighted sums are in float32 at least
    own = -(-tokens // tp)
    chosen = own * choices
    rows = _rows(config, tokens, own, ranks, cut)
    # Expert and weight of each choice, and all logits or scores; for lower precisions, float32
    # copies of tokens and weights.
    router = chosen * (_INDEX + wide) + own * config.num_experts * wide
    if size < _FP32:
        router += (own + config.num_experts) * hidden * wide
    # For the weighted sum the choice of each row, which selects its token too, and the outputs of
    # experts as they are.
    weights = 0  # the router saves them, unless they are others
    if parts == 1 or ranks.dispatcher == "allgather":
        weights = chosen * parts * wide if parts > 1 else 0
        dispatch = chosen * parts * _INDEX + rows.received * hidden * size
    else:  # received rows are sorted by expert, and sorted back
        returned = rows.received // cut if rows.slots is None else rows.slots
        dispatch = (2 * rows.received + (rows.slots or chosen)) * _INDEX + returned * hidden * size
    if config.moe_expert_rank_capacity_factor:  # NaN for more rows, and whether there are more
        weights = (weights or chosen * wide) + 1
    inner, width = config.activation_saves, config.moe_ffn_hidden_size // cut
    linear = layer_pass.saved_bytes.of_linear  # the rows, and the activation's result
    row = width * inner * size + linear(hidden + width)
    row += 2 * _INDEX if config.has_mlp_bias else 0
    offsets = 0
    if size <= _FP32:  # of the products of all experts at once, and what clears the tail
        row += 2 if rows.has_tail else 0
        offsets = 2 * _OFFSET * config.num_experts // ranks.ep
    shared = config.moe_shared_expert_intermediate_size // tp
    shared = shared * inner * size + linear(shared)
    return {
        "router": router,
        "": dispatch + weights,
        "experts": rows.computed * row + offsets,
        "shared": tokens * shared,
    }
