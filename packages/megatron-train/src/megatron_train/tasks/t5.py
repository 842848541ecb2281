"""Span corruption: an encoder reads a text with gaps, a decoder writes what is missing (T5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_models import Dropout, EncoderDecoder, EncoderDecoderConfig, encoder_decoder_flops
from megatron_parallel import DropoutKey, TensorSpec
from torch import Tensor, nn

from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.tasks.staged import StagedTask
from megatron_train.tasks.task import MicroBatch, field_sum, labels_with_loss

LOSS = "lm loss"


class T5Task(StagedTask):
    """Predicts each next token of the decoder's text (Raffel et al. 2020, section 3.1.4).

    The loss is the cross entropy over the tokens of the decoder's text, without its padding.
    """

    losses = (LOSS,)
    metrics = ()
    auxiliary_losses: tuple[str, ...] = ()

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float | Tensor]:
        """Returns the number of tokens that the decoder predicts."""
        return {LOSS: field_sum(batches, "loss_mask")}

    def context_parallel_slice(self, batch: MicroBatch) -> MicroBatch:
        """Raises an error, since no encoder-decoder supports context parallelism.

        Raises:
            TrainError: Always.
        """
        raise TrainError("the task t5 does not cut sequences; give --context-parallel-size 1")

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Any]:
        """Returns the keyword arguments of a stage, the same for all but labels.

        Padding follows the decoder's text. It needs no mask, since no token before it sees it.
        """
        fields, module = batch.fields, self._stage(stage)
        found: dict[str, Any] = {
            "source": fields["encoder_tokens"],
            "source_padding": fields["encoder_document_ids"] < 0,
            "target": fields["decoder_tokens"],
            **self._dropout(batch, iteration),
        }
        if module.last:
            found["labels"] = labels_with_loss(fields)
        return found

    def _dropout(self, batch: MicroBatch, iteration: int | None) -> dict[str, Dropout]:
        """Returns the keyword argument for dropout, with a key for the longer of both texts."""
        if iteration is None or not self._drops(iteration):
            return {}
        key = DropoutKey.for_batch(
            seed=self._seed,
            iteration=iteration,
            samples=batch.fields["sample_ids"],
            positions=max(self._lengths(batch)),
        )
        return {"dropout": Dropout(key, self._hidden_dropout, self._attention_dropout)}

    def stage_output_spec(
        self, batch: MicroBatch, stage: int
    ) -> TensorSpec | tuple[TensorSpec, ...]:
        """Returns shape and dtype of the output of a stage: one text's stream, or both."""
        module: EncoderDecoder = self._stages[0]
        samples = len(batch.fields["encoder_tokens"])
        return module.stage_output_spec(stage, samples, *self._lengths(batch))

    @staticmethod
    def _lengths(batch: MicroBatch) -> tuple[int, int]:
        """Returns the lengths of the encoder's and the decoder's texts."""
        return batch.fields["encoder_tokens"].shape[1], batch.fields["decoder_tokens"].shape[1]

    def loss(self, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the cross entropy ``[b, s]`` summed over the tokens without padding."""
        return {LOSS: (output * batch.fields["loss_mask"]).sum()}

    def flops(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the FLOPs of a forward and backward pass over the micro-batches."""
        config = self._model
        if not isinstance(config, EncoderDecoderConfig):
            raise TrainError(f"the task t5 trains models of kind t5, not {config.kind}")
        samples = sum(batch.samples for batch in batches)
        return float(encoder_decoder_flops(config, *self._lengths(batches[0]), samples))


def t5_task(run: RunConfig, stages: Sequence[nn.Module], family: str | None) -> T5Task:
    """Returns the task of a run; see `megatron_train.tasks.kinds.TaskKind`."""
    training = run.training
    return T5Task(
        stages,
        family,
        seed=training.seed,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
    )
