"""The head that a model is fine-tuned with. Importing this module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

from megatron_models.components.fields import flag
from megatron_models.components.heads.spec import Pooling, SequenceHeadSpec
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError

TaskHead = Literal["none", "classification", "regression", "multiple_choice", "embedding", "reward"]
HeadPooling = Literal["auto", "first", "last", "mean"]

OUTPUTS: Final[Mapping[TaskHead, int]] = MappingProxyType(
    {
        "none": 0,
        "classification": 2,
        "regression": 1,
        "multiple_choice": 1,
        "embedding": 0,
        "reward": 1,
    }
)
"""Default width of each head's output; 0: the pooled vector itself."""

FREE_WIDTH: Final = ("classification", "regression")
"""Heads whose width may be chosen."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig(StreamConfig):
    """The head of whole sequences that replaces the heads of pretraining."""

    task_head: TaskHead = field(
        default="none",
        metadata=flag(
            "--task-head",
            "head of whole sequences in place of the heads of pretraining: logits of classes, "
            "values (regression), one logit for each choice (multiple_choice), the pooled vector "
            "(embedding), or one scalar (reward) (our name)",
            choices=get_args(TaskHead),
            head=True,
        ),
    )
    num_labels: int = field(
        default=0,
        metadata=flag(
            "--num-labels",
            "classes of a classification or values of a regression; 0: 2 classes or 1 value (our "
            "name)",
            positive=True,
            derived=True,
            maximum=1_000_000,
            head=True,
        ),
    )
    head_pooling: HeadPooling = field(
        default="auto",
        metadata=flag(
            "--head-pooling",
            "tokens that the task head reads: the first, the last that is no padding, or the mean "
            "of all; auto: the first of an encoder, the last of a decoder, and the mean for "
            "embeddings (our name)",
            choices=get_args(HeadPooling),
            head=True,
        ),
    )
    normalize_embedding: bool = field(
        default=True,
        metadata=flag(
            "--no-normalize-embedding",
            "divide the embedding of a sequence by its Euclidean norm (our name)",
            head=True,
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        self._set("num_labels", OUTPUTS[self.task_head])

    def _check(self) -> None:
        super()._check()
        width = OUTPUTS[self.task_head]
        if self.num_labels != width and self.task_head not in FREE_WIDTH:
            raise ConfigError(
                f"{{num_labels}} does not fit {{task_head}}, whose width is {width}; leave it out, "
                f"or use {{task_head:name}} {FREE_WIDTH[0]!r}",
                vars(self),
            )
        if self.head_pooling != "auto" and self.task_head == "none":
            raise ConfigError(
                "{head_pooling} has no effect without {task_head:name}; leave it out", vars(self)
            )
        if not self.normalize_embedding and self.task_head != "embedding":
            raise ConfigError(
                "{normalize_embedding:name} has an effect only with {task_head:name} 'embedding', "
                "not {task_head:repr}; leave it out",
                vars(self),
            )

    def sequence_head(
        self, pooling: Pooling, *, has_pooler: bool, has_output_bias: bool
    ) -> SequenceHeadSpec | None:
        """Returns the task head, or None if there is none.

        Args:
            pooling: What ``auto`` stands for, if the head is not an embedding.
            has_pooler: Whether a pooler precedes the output layer.
            has_output_bias: Whether the output layer has a bias.
        """
        if self.task_head == "none":
            return None
        embeds = self.task_head == "embedding"
        auto: Pooling = "mean" if embeds else pooling
        return self.component(
            SequenceHeadSpec,
            pooling=auto if self.head_pooling == "auto" else self.head_pooling,
            has_pooler=has_pooler and not embeds,
            outputs=self.num_labels,
            has_output_bias=has_output_bias,
            normalizes=embeds and self.normalize_embedding,
            drops=not embeds,
        )
