"""Floating-point operations of a training step, from the configuration alone.

Counts the matrix products of one forward and one backward pass: two operations per multiply-add,
and twice the forward pass for the backward pass. Causal attention counts half of the square, a
window the pairs in it. Recomputation, routers, and experts that a token does not use are not
counted. This is the numerator of model FLOPs utilisation (MFU), as in Megatron-LM.
"""

from megatron_models.models.model_config import ModelConfig

_PASSES = 3  # forward, backward for inputs, backward for weights
_MULTIPLY_ADD = 2


def training_flops(
    config: ModelConfig,
    sequence_length: int,
    tokens: int | None = None,
    *,
    squared_lengths: int | None = None,
) -> int:
    """Returns the floating-point operations of a forward and backward pass.

    The two texts of an encoder-decoder are counted with the same length; `encoder_decoder_flops`
    has one for each.

    Args:
        config: The model's configuration.
        sequence_length: Length of each sequence, in tokens.
        tokens: Number of tokens. Defaults to one sequence.
        squared_lengths: Sum of the squared lengths of all documents, for packed documents that do
            not attend to each other. Defaults to ``tokens * sequence_length``.
    """
    if tokens is None:
        tokens = sequence_length
    if squared_lengths is None:
        squared_lengths = tokens * sequence_length
    pairs = config.multiply_adds_of_pairs(tokens, squared_lengths)
    each = config.multiply_adds
    sequences = -(-tokens // sequence_length) if sequence_length else 0
    work = tokens * each.per_token + sequences * each.per_sequence + pairs
    return operations(work)


def operations(multiply_adds: int) -> int:
    """Returns the operations of a forward and backward pass with the forward's multiply-adds."""
    return _PASSES * _MULTIPLY_ADD * multiply_adds


def tokens_per_pair(config: ModelConfig) -> float:
    """Returns the cost of one query-key pair in attention, in units of the other work of one token.

    Attention makes a long document more expensive than as many tokens in short ones. With ``h``
    hidden channels and usual widths the result is about ``1 / 6h``.
    """
    return config.multiply_adds.per_pair / config.multiply_adds.per_token
