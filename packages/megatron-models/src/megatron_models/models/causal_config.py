"""The configuration of models for decoding, of any kind. Importing it does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_models.components.embedding.spec import EmbeddingConfig, TiedOutputConfig
from megatron_models.components.head import Head
from megatron_models.components.heads.config import HeadConfig
from megatron_models.components.heads.spec import SEQUENCE_HEAD, SequenceHeadSpec
from megatron_models.components.mixer import Feature, UnsupportedFeature
from megatron_models.errors import ConfigError
from megatron_models.models.trunk_config import TrunkConfig


@dataclass(frozen=True)
class CausalConfig(TrunkConfig, HeadConfig, TiedOutputConfig):
    """The configuration of a decoder-only model over one vocabulary, or with a task head."""

    takes_position_axes: ClassVar[bool] = True

    def _check(self) -> None:
        super()._check()
        if self.task_head != "none" and self.multi_token():
            raise ConfigError(
                "{mtp_num_layers} needs logits of tokens, which a model with {task_head} does not "
                "have; leave {mtp_num_layers:name} out",
                vars(self),
            )

    @property
    def predicts_tokens(self) -> bool:
        """Whether tokens have logits: a task head replaces the output matrix."""
        return self.task_head == "none"

    @property
    def ties_output(self) -> bool:
        """Whether the token embeddings are the output matrix too."""
        return self.predicts_tokens and not self.untie_embeddings_and_output_weights

    def output(self) -> EmbeddingConfig | None:
        """Returns the configuration itself if there is an untied output matrix, else None."""
        return self if self.predicts_tokens and not self.ties_output else None

    @property
    def head_of_sequences(self) -> SequenceHeadSpec | None:
        """The task head, or None."""
        return self.sequence_head("last", has_pooler=False, has_output_bias=False)

    def heads(self) -> Mapping[str, Head]:
        """Returns the task head, if there is one."""
        head = self.head_of_sequences
        return {} if head is None else {SEQUENCE_HEAD: head}

    def unsupported_reason(self, feature: Feature) -> UnsupportedFeature | None:
        """Returns why the model does not support a feature, or None."""
        if not self.predicts_tokens and feature in ("decode", "document_pool"):
            return UnsupportedFeature(
                "{task_head}", "the head reads whole sequences; use task_head 'none'"
            )
        return super().unsupported_reason(feature)
