"""The configuration of models for decoding, of any kind. Importing it does not import torch."""

from dataclasses import dataclass, field

from megatron_models.components.embedding.spec import EmbeddingConfig, OutputConfig
from megatron_models.components.fields import flag
from megatron_models.models.trunk_config import TrunkConfig


@dataclass(frozen=True, kw_only=True)
class CausalConfig(TrunkConfig, OutputConfig):
    """The configuration of a decoder-only model over one vocabulary."""

    untie_embeddings_and_output_weights: bool = field(
        default=False,
        metadata=flag(
            "--untie-embeddings-and-output-weights",
            "separate output matrix instead of the token embedding",
        ),
    )

    def output(self) -> EmbeddingConfig | None:
        """Returns the configuration itself if the output matrix is untied, else None."""
        return self if self.untie_embeddings_and_output_weights else None
