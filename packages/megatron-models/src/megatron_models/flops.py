"""Floating-point operations of a training step, from the configuration alone.

Counts the matrix products of one forward and one backward pass (two operations per multiply-add,
the backward twice the forward); causal attention counts half of the square. Recomputed activations
are not counted, nor are experts that a token does not go to: this is the numerator of model FLOPs
utilisation (MFU), as in Megatron-LM.
"""

from megatron_models.config import GPTConfig

_PASSES = 3  # forward once, backward with respect to inputs and to weights
_MULTIPLY_ADD = 2


def gpt_flops(
    config: GPTConfig,
    sequence_length: int,
    tokens: int | None = None,
    *,
    squared_lengths: int | None = None,
) -> int:
    """Return the operations of a forward and backward pass.

    Args:
        config: the model.
        sequence_length: length of each causal sequence, in tokens.
        tokens: tokens processed; by default one sequence.
        squared_lengths: sum of the squares of the lengths of all documents, where packed documents
            do not attend to each other; by default ``tokens * sequence_length``.
    """
    if tokens is None:
        tokens = sequence_length
    if squared_lengths is None:
        squared_lengths = tokens * sequence_length
    hidden, query = config.hidden_size, config.query_size
    key_value = config.num_query_groups * config.kv_channels
    projections = hidden * (query + 2 * key_value) + query * hidden
    feed_forward = sum(_feed_forward(config, experts) for experts in config.moe_layers)
    matrices = config.num_layers * projections + feed_forward + hidden * config.padded_vocab_size
    # Scores and weighted values: two products of query * length^2, of which causality keeps half.
    attention = config.num_layers * query * squared_lengths
    return _PASSES * _MULTIPLY_ADD * (tokens * matrices + attention)


def tokens_per_pair(config: GPTConfig) -> float:
    """Operations of one pair of query and key in attention over all others of one token.

    So much attention makes a long document dearer than as many tokens in short ones; with ``h``
    hidden channels and usual widths about ``1 / 6h``.
    """
    pair = 2 * gpt_flops(config, 0, 0, squared_lengths=1)  # of the square, causality keeps half
    return pair / gpt_flops(config, 1, 1, squared_lengths=0)


def _feed_forward(config: GPTConfig, experts: bool) -> int:
    """Elements of the matrices that one token is multiplied with."""
    per_channel = config.hidden_size * (3 if config.gated else 2)
    if not experts:
        return per_channel * config.ffn_hidden_size
    chosen = config.moe_router_topk * config.moe_ffn_hidden_size
    width = chosen + config.moe_shared_expert_intermediate_size
    return per_channel * width + config.hidden_size * config.num_experts
