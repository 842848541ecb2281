"""The configuration of an encoder-decoder model: that of its decoder, and the encoder's depth.

Importing this module does not import torch.
"""

from dataclasses import dataclass, field, replace

from megatron_models.config import GPTConfig
from megatron_models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """The shape of an encoder and a decoder, which differ in depth alone.

    Raises:
        ConfigError: no encoder layer, or an option of the decoder that the model does not have:
            tied embeddings (encoder, decoder and output would hold one weight on three stages, and
            a weight can be tied over two), experts, attention sinks.
    """

    decoder: GPTConfig = field(
        metadata={"help": "the decoder, and but for num_layers the encoder; embeddings are untied"}
    )
    encoder_num_layers: int = field(
        metadata={"flag": "--encoder-num-layers", "help": "number of encoder layers"}
    )

    def __post_init__(self) -> None:
        if self.encoder_num_layers < 1:
            raise ConfigError(
                f"encoder_num_layers must be a positive number, not {self.encoder_num_layers}"
            )
        if not self.decoder.untie_embeddings_and_output_weights:
            raise ConfigError(
                "embeddings of encoder, decoder and output are on three stages, and a weight can "
                "be tied over two: set {untie_embeddings_and_output_weights:name}",
                vars(self.decoder),
            )
        if self.decoder.num_experts:
            raise ConfigError(
                "an encoder-decoder has no experts: {num_experts}", vars(self.decoder)
            )
        if self.decoder.softmax_type != "vanilla":
            raise ConfigError(
                "an encoder-decoder has no attention sinks: {softmax_type}", vars(self.decoder)
            )

    @property
    def encoder(self) -> GPTConfig:
        """The encoder's configuration."""
        return replace(self.decoder, num_layers=self.encoder_num_layers)
