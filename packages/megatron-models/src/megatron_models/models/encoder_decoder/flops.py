"""Floating-point operations of a training step of an encoder-decoder.

As `megatron_models.flops`, for two texts of different lengths. Cross-attention has a query-key pair
for each token of the target and each of the source, and projects the source to keys and values.
"""

from megatron_models.flops import operations
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig


def encoder_decoder_flops(
    config: EncoderDecoderConfig, source_length: int, target_length: int, samples: int = 1
) -> int:
    """Returns the floating-point operations of a forward and backward pass.

    Args:
        config: The model's configuration.
        source_length: Length of each text of the encoder, in tokens.
        target_length: Length of each text of the decoder, in tokens.
        samples: Number of samples, each with both texts.
    """
    multiply_adds = 0
    for name, spec in config.parameters().items():
        of_source = name.startswith("encoder.") or ".cross_attention.kv." in name
        multiply_adds += spec.multiply_adds * (source_length if of_source else target_length)
    trunks = config.trunks()
    multiply_adds += trunks["encoder"].multiply_adds_of_pairs(source_length, source_length**2)
    for mixer in trunks["decoder"].mixers:
        if mixer.reads_source:
            multiply_adds += mixer.multiply_adds_per_pair() * source_length * target_length
        else:
            multiply_adds += mixer.multiply_adds_of_pairs(target_length, target_length**2)
    return operations(multiply_adds * samples)
