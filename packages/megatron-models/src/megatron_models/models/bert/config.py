"""The configuration of a BERT model (Devlin et al. 2019). Importing it does not import torch."""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.attention.per_layer import attention_changes
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.components.embedding.spec import EmbeddingSpec, OutputConfig
from megatron_models.components.fields import flag
from megatron_models.components.head import Head
from megatron_models.components.heads.config import HeadConfig
from megatron_models.components.heads.spec import SEQUENCE_HEAD, SequenceHeadSpec
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.masked_lm.spec import HEAD, MaskedLMSpec
from megatron_models.components.mlp.spec import MLPConfig, MLPSpec
from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.residual import ResidualConfig
from megatron_models.errors import ConfigError
from megatron_models.models.trunk_config import TrunkConfig


@dataclass(frozen=True, kw_only=True)
class BertConfig(TrunkConfig, HeadConfig, MLPConfig, ResidualConfig, AttentionConfig, OutputConfig):
    """The shape of an encoder whose tokens attend in both directions, and its heads.

    The defaults are Megatron-LM's: pre-LN with a final norm, two token types, a head of masked
    language modelling, and a binary head on the pooled first token. BERT and RoBERTa have post-LN
    (``norm_placement="sum"``) and a norm of the embeddings. The output matrix is the token
    embedding.

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    kind: ClassVar[str] = "bert"

    num_tokentypes: int = field(
        default=2,
        metadata=flag(
            "--num-tokentypes",
            "number of token types, which tell apart the sentences of a pair; 0: none",
            nonnegative=True,
            maximum=1_000_000,
        ),
    )
    embedding_norm: bool = field(
        default=False,
        metadata=flag("--embedding-norm", "a norm after the sum of the embeddings (our name)"),
    )
    position_offset: int = field(
        default=0,
        metadata=flag(
            "--position-offset",
            "index of the learned position of the first token (RoBERTa: 2, after the index of the "
            "token for padding) (our name)",
            nonnegative=True,
            unit="positions",
        ),
    )
    masked_lm_head: bool = field(
        default=True,
        metadata=flag(
            "--no-masked-lm-head",
            "the head of masked language modelling; without it tokens have no logits (our name)",
            head=True,
        ),
    )
    bert_binary_head: bool = field(
        default=True,
        metadata=flag(
            "--bert-no-binary-head",
            "the binary head for pairs of sentences, and its pooler",
            head=True,
        ),
    )
    bert_pooler: bool = field(
        default=False,
        metadata=flag("--bert-pooler", "a pooler without the binary head (our name)", head=True),
    )

    def _check(self) -> None:
        super()._check()
        if self.position_offset and self.position_embedding_type != "learned_absolute":
            raise ConfigError(
                "{position_offset} needs {position_embedding_type:name} 'learned_absolute', not "
                "{position_embedding_type:repr}",
                vars(self),
            )
        if self.position_offset >= self.max_position_embeddings:
            raise ConfigError(
                "{position_offset} leaves no position of {max_position_embeddings}; use "
                f"{{position_offset:name}} {self.max_position_embeddings - 1} or less",
                vars(self),
            )
        if self.bert_pooler and self.bert_binary_head:
            raise ConfigError(
                "{bert_pooler:name} has no effect with a binary head, which has a pooler; leave it "
                "out, or set {bert_binary_head:name}",
                vars(self),
            )

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that there are positions for."""
        return self.max_position_embeddings - self.position_offset

    @property
    def predicts_tokens(self) -> bool:
        """Whether tokens have logits: a task head replaces the heads of pretraining."""
        return self.masked_lm_head and self.task_head == "none"

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns one trunk of embedding, layers and final norm, without a prefix."""
        norm = self.component(NormSpec)
        embedding = self.component(EmbeddingSpec, is_output_weight=self.predicts_tokens)
        mlp = self.component(MLPSpec)
        layers = {
            number: self.residual_layer(
                [("attention", self._attention(number), ATTENTION_OUTPUT), ("mlp", mlp, MLP_OUTPUT)]
            )
            for number in range(self.num_layers)
        }
        final = norm if self.has_final_norm else None
        return {"": TrunkSpec(embedding, layers, final, self.hidden_size)}

    def _attention(self, number: int) -> AttentionSpec:
        changes = attention_changes(self, number)
        return self.component(AttentionSpec, bidirectional=True, **changes)

    def heads(self) -> dict[str, Head]:
        """Returns the head of tokens and the head of sequences, if the model has them."""
        found: dict[str, Head] = {}
        if self.predicts_tokens:
            found[HEAD] = self.component(MaskedLMSpec)
        of_sequences = self.head_of_sequences
        if of_sequences is not None:
            found[SEQUENCE_HEAD] = of_sequences
        return found

    @property
    def head_of_sequences(self) -> SequenceHeadSpec | None:
        """The task head, or the pooler with or without the binary head, or None."""
        task = self.sequence_head("first", has_pooler=True, has_output_bias=True)
        if task is not None or not (self.bert_binary_head or self.bert_pooler):
            return task
        outputs = 2 if self.has_binary_head else 0
        return self.component(SequenceHeadSpec, pooling="first", has_pooler=True, outputs=outputs)

    @property
    def has_sequence_pooler(self) -> bool:
        """Whether the head of sequences has a pooler."""
        head = self.head_of_sequences
        return head is not None and head.has_pooler

    @property
    def has_binary_head(self) -> bool:
        """Whether the output of the head of sequences is that of the binary head."""
        return self.bert_binary_head and self.task_head == "none"

    @property
    def has_task_output(self) -> bool:
        """Whether there is a task head with an output layer."""
        head = self.head_of_sequences
        return self.task_head != "none" and head is not None and head.outputs > 0
