"""The entry of encoder-decoder models in the group ``megatron.models``."""

from collections.abc import Mapping
from typing import Any

from megatron_models.kinds import ModelKind
from megatron_models.models.encoder_decoder.config import EncoderDecoderConfig


def _three_embeddings(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Migrates version 0 to 1: encoder, decoder and output layer had a weight each."""
    return {
        **fields,
        "untie_embeddings_and_output_weights": True,
        "separate_decoder_embedding": True,
    }


KIND = ModelKind(
    name="t5",
    config=EncoderDecoderConfig,
    stages="megatron_models.models.encoder_decoder.model:encoder_decoder_chunks",
    default_task="t5",
    summary="an encoder, and a decoder that attends to its output",
    supports_decoding=True,
    migrations=(_three_embeddings,),
    former_names=("encoder_decoder",),
)
