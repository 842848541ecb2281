"""The task of predicting masked tokens: inputs, loss and accuracy."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ckpt import ModelRecord
from megatron_models import ConfigError, config_of, record_of, training_flops
from megatron_parallel import TensorSpec, vocab_parallel_cross_entropy
from megatron_parallel.collectives import gather_from_axis
from megatron_train import MicroBatch, RunConfig
from torch import Tensor

from bidirectional.model import Encoder

LOSS, ACCURACY = "lm loss", "accuracy"


class MaskedLM:
    """Computes the cross entropy and the accuracy over masked tokens."""

    losses = (LOSS,)
    metrics = (ACCURACY,)
    auxiliary_losses = ()

    def __init__(self, run: RunConfig, stages: Sequence[Encoder], family: str | None) -> None:
        self.stages = stages
        self._family = family
        self._config = run.model
        self._tp = stages[0].mesh.axis("tp")

    @property
    def model_record(self) -> ModelRecord:
        """The model's kind, family and configuration."""
        return ModelRecord(family=self._family, **record_of(self._config))

    def migrated_config(self, record: ModelRecord) -> dict[str, Any]:
        """Returns the configuration in a checkpoint's record with the current fields."""
        return config_of(record).to_dict()

    def fsdp_units(self, stage: Encoder) -> Sequence[Any]:
        """Returns the blocks of a stage."""
        return list(stage.layers.values())

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Returns the number of masked tokens."""
        masked = sum(float(batch.fields["loss_mask"].sum()) for batch in batches)
        return {LOSS: masked, ACCURACY: masked}

    def context_parallel_slice(self, batch: MicroBatch) -> MicroBatch:
        """Refuses context parallelism, which the encoder does not support.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "this encoder does not support sequence or context parallelism; leave them out"
        )

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Tensor]:
        """Returns the padding mask for every stage, and tokens and segments for the first one."""
        fields = batch.fields
        inputs = {"padding": fields["document_ids"] < 0}
        if stage == 0:
            inputs |= {"x": fields["tokens"], "segments": fields["token_types"]}
        return inputs

    def stage_output_spec(self, batch: MicroBatch, stage: int) -> TensorSpec:
        """Returns shape and dtype of the activations between two stages."""
        return self.stages[0].stage_output_spec(*batch.fields["tokens"].shape)

    def loss(self, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the cross entropy and the correct predictions, summed over masked tokens."""
        labels, masked = batch.fields["labels"].t(), batch.fields["loss_mask"].t()
        size = self._config.vocab_size
        losses = vocab_parallel_cross_entropy(output, labels, self._tp, size)
        logits = gather_from_axis(output.detach(), self._tp)[..., :size]
        correct = (logits.argmax(-1) == labels) * masked
        return {LOSS: (losses * masked).sum(), ACCURACY: correct.sum()}

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the FLOPs of a forward and backward pass over the micro-batches."""
        length = batches[0].fields["tokens"].shape[1]
        return float(training_flops(self._config, length, sum(b.tokens for b in batches)))
