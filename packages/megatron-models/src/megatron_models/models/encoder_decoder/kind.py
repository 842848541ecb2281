"""The entry of encoder-decoder models in the group ``megatron.models``."""

from megatron_models.kinds import ModelKind
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig

KIND = ModelKind(
    name="encoder_decoder",
    config=EncoderDecoderConfig,
    stages="megatron_models.models.encoder_decoder.model:encoder_decoder_chunks",
    default_task="encoder_decoder",
    summary="an encoder, and a decoder that attends to its output",
    supports_decoding=True,
)
