"""Floating-point operations of a training step, from the configuration alone.

Counts the matrix products of one forward and one backward pass (two operations per multiply-add,
the backward twice the forward); causal attention counts half of the square. Recomputed activations
are not counted, nor are experts that a token does not go to: this is the numerator of model FLOPs
utilisation (MFU), as in Megatron-LM.
"""

from megatron_models.models.model_config import ModelConfig

_PASSES = 3  # forward once, backward with respect to inputs and to weights
_MULTIPLY_ADD = 2


def training_flops(
    config: ModelConfig,
    sequence_length: int,
    tokens: int | None = None,
    *,
    squared_lengths: int | None = None,
) -> int:
    """Returns the operations of a forward and backward pass.

    Args:
        config: the model.
        sequence_length: length of each sequence, in tokens.
        tokens: tokens processed; by default one sequence.
        squared_lengths: sum of the squares of the lengths of all documents, where packed documents
            do not attend to each other; by default ``tokens * sequence_length``.
    """
    if tokens is None:
        tokens = sequence_length
    if squared_lengths is None:
        squared_lengths = tokens * sequence_length
    multiply_adds = config.multiply_adds
    return (
        _PASSES
        * _MULTIPLY_ADD
        * (tokens * multiply_adds.per_token + multiply_adds.per_squared_length * squared_lengths)
    )


def tokens_per_pair(config: ModelConfig) -> float:
    """Operations of one pair of query and key in attention over all others of one token.

    So much attention makes a long document dearer than as many tokens in short ones; with ``h``
    hidden channels and usual widths about ``1 / 6h``.
    """
    return config.multiply_adds.per_pair / config.multiply_adds.per_token
