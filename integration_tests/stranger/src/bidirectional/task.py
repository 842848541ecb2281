"""Predict hidden tokens: the loss and the accuracy of `megatron_train`'s runs."""

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
    """Cross entropy over the tokens that were hidden, and the share that is predicted right."""

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
        """Return the configuration of a checkpoint's record in the fields of today."""
        return config_of(record).to_dict()

    def fsdp_units(self, stage: Encoder) -> Sequence[Any]:
        """Return the blocks of a stage."""
        return list(stage.layers.values())

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the number of hidden tokens."""
        hidden = sum(float(batch.fields["loss_mask"].sum()) for batch in batches)
        return {LOSS: hidden, ACCURACY: hidden}

    def context_parallel_slice(self, batch: MicroBatch) -> MicroBatch:
        """Refuse context parallelism, which the encoder has not.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("this encoder is not cut along the sequence")

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Tensor]:
        """Return tokens and segments for the first stage, and which tokens are padding for all."""
        fields = batch.fields
        given = {"padding": fields["document_ids"] < 0}
        if stage == 0:
            given |= {"x": fields["tokens"], "segments": fields["token_types"]}
        return given

    def stage_output_spec(self, batch: MicroBatch, stage: int) -> TensorSpec:
        """Return shape and dtype of the activations between two stages."""
        return self.stages[0].stage_output_spec(*batch.fields["tokens"].shape)

    def loss(self, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Return the cross entropy and the hits, summed over the hidden tokens."""
        labels, hidden = batch.fields["labels"].t(), batch.fields["loss_mask"].t()
        size = self._config.vocab_size
        losses = vocab_parallel_cross_entropy(output, labels, self._tp, size)
        logits = gather_from_axis(output.detach(), self._tp)[..., :size]
        hits = (logits.argmax(-1) == labels) * hidden
        return {LOSS: (losses * hidden).sum(), ACCURACY: hits.sum()}

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Return the operations of a forward and backward pass over the batches."""
        length = batches[0].fields["tokens"].shape[1]
        return float(training_flops(self._config, length, sum(b.tokens for b in batches)))
