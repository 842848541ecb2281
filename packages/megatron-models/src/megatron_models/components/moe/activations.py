"""Bytes of activations that a layer with experts saves for its backward pass, on one rank.

Each of ``t`` tensor-parallel ranks routes ``n = s b / t`` tokens of its own. The experts are
divided over ``ep`` ranks, and each expert's matrices are cut over ``expert_tp`` ranks. All-gather
brings all ``n ep expert_tp`` tokens of these ranks to each rank; all-to-all brings only the rows of
the rank's own experts. Either way a rank computes ``n k expert_tp`` rows under an even load, where
``k`` is the number of experts of a token. With ``ep = 1`` that is exact; otherwise it is the mean
over the ranks of ``ep``.
"""

from math import ceil
from typing import Final

from megatron_models.components.mixer import BytesByPart, LayerPass
from megatron_models.components.moe.config import MoEConfig

_INDEX: Final = 8
_FP32: Final = 4


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
    rows = chosen * cut
    if factor := config.moe_expert_capacity_factor:
        even = ceil(rows * factor)
        rows = even if config.moe_pad_expert_input_to_capacity else min(rows, even)
    # Expert and weight of each choice, and all logits or scores; for lower precisions, float32
    # copies of tokens and weights.
    router = chosen * (_INDEX + wide) + own * config.num_experts * wide
    if size < _FP32:
        router += (own + config.num_experts) * hidden * wide
    # Source and destination index of each row; and the outputs of experts, for the weighted sum.
    if parts == 1:
        dispatch = rows * _INDEX + chosen * (_INDEX + hidden * wide)
    elif ranks.dispatcher == "allgather":
        dispatch = rows * _INDEX + chosen * parts * (_INDEX + wide + hidden * wide)
    else:  # received rows are sorted by expert, and sorted back
        dispatch = 2 * rows * _INDEX + chosen * (2 * _INDEX + hidden * wide)
    inner = config.activation_saves + 1  # and the activation's result
    row = (hidden + config.moe_ffn_hidden_size // cut * inner) * size
    row += 2 * _INDEX if config.has_mlp_bias else 0
    shared = config.moe_shared_expert_intermediate_size // tp * inner * size
    return {
        "router": router,
        "": dispatch,
        "experts": rows * row,
        "shared": tokens * shared,
    }
