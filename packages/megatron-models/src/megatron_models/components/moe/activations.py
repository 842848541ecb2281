"""Bytes of activations that a layer with experts keeps for its backward pass, on one rank.

Of ``t`` tensor-parallel ranks each routes ``n = s b / t`` tokens of its own. They go to ``ep``
parts of the experts, whose matrices are cut over ``expert_tp`` ranks: all-gather brings all
``n ep expert_tp`` tokens of these ranks here, all-to-all the rows of this rank's experts alone.
Either way ``n k expert_tp`` rows are computed here if the load is even, ``k`` being the choices of
a token; with ``ep = 1`` that is exact, otherwise it is the mean over the ranks of ``ep``.
"""

from typing import Final

from megatron_models.components.mixer import BytesByPart, LayerPass
from megatron_models.components.moe.config import MoEConfig

_INDEX: Final = 8
_FP32: Final = 4


def expert_activations(config: MoEConfig, layer_pass: LayerPass) -> BytesByPart:
    """Returns the bytes that routing, dispatch and experts keep, by the part that keeps them.

    The input of the layer is left out, and so are losses of the router.
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
    # The expert and the weight of each choice; copies of tokens and weights in lower precision.
    router = chosen * (_INDEX + wide)
    if size < _FP32:
        router += (own + config.num_experts) * hidden * wide
    # Whence each row comes and where its answer goes; and the answers, to weight them.
    if parts == 1:
        dispatch = rows * _INDEX + chosen * (_INDEX + hidden * wide)
    elif ranks.dispatcher == "allgather":
        dispatch = rows * _INDEX + chosen * parts * (_INDEX + wide + hidden * wide)
    else:  # rows are sorted by expert after they have come, and back again
        dispatch = 2 * rows * _INDEX + chosen * (2 * _INDEX + hidden * wide)
    inner = 4 if config.gated else 2  # widths of the activation's input and output
    row = (hidden + config.moe_ffn_hidden_size // cut * inner) * size
    row += 2 * _INDEX if config.has_mlp_bias else 0
    shared = config.moe_shared_expert_intermediate_size // tp * inner * size
    return {
        "router": router,
        "": dispatch,
        "experts": rows * row,
        "shared": tokens * shared,
    }
