"""Masked language modelling with pairs of segments (Devlin et al. 2019, section 3.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron_train.config.run import RunConfig
from megatron_train.tasks.encoder import EncoderTask, class_losses
from megatron_train.tasks.task import MicroBatch, field_sum, labels_with_loss

LM_LOSS, ORDER_LOSS, ORDER_ACCURACY = "lm loss", "sop loss", "sop accuracy"
"""Names in logs; those of losses are Megatron-LM's."""


class BertTask(EncoderTask):
    """Predicts masked tokens and, with a binary head, whether the two segments are swapped.

    The loss of masked tokens is divided by their number in the global batch, and that of the order
    of segments by the number of sequences.
    """

    cut_fields = ("tokens", "token_types", "labels", "loss_mask")

    @property
    def losses(self) -> Sequence[str]:
        """The loss of masked tokens and, with a binary head, of the order of segments."""
        return (LM_LOSS, ORDER_LOSS) if self._pairs else (LM_LOSS,)

    @property
    def metrics(self) -> Sequence[str]:
        """The share of sequences whose order the binary head predicts."""
        return (ORDER_ACCURACY,) if self._pairs else ()

    @property
    def _pairs(self) -> bool:
        pairs: bool = self._stages[0].config.bert_binary_head
        return pairs

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float | Tensor]:
        """Returns the number of masked tokens and, with a binary head, of sequences."""
        masked = field_sum(batches, "loss_mask")
        if not self._pairs:
            return {LM_LOSS: masked}
        sequences = float(sum(len(batch.fields["is_random"]) for batch in batches))
        return {LM_LOSS: masked, ORDER_LOSS: sequences, ORDER_ACCURACY: sequences}

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Any]:
        """Returns the keyword arguments of a stage; the last one gets the masked tokens."""
        found = dict(super().stage_inputs(batch, stage, iteration))
        if self._stage(stage).last:
            found["labels"] = labels_with_loss(batch.fields)
        return found

    def loss(self, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the sums over masked tokens and over sequences.

        Args:
            output: A `megatron_models.EncoderOutput` with losses of tokens ``[b, s]``.
            batch: The micro-batch.
        """
        found = {LM_LOSS: (output.tokens * batch.fields["loss_mask"]).sum()}
        if self._pairs:
            swapped = batch.fields["is_random"]
            hits = output.sequences.detach().argmax(-1) == swapped
            found |= {
                ORDER_LOSS: self._of_sequences(class_losses(output.sequences, swapped).sum()),
                ORDER_ACCURACY: self._of_sequences(hits.sum()),
            }
        return found


def bert_task(run: RunConfig, stages: Sequence[nn.Module], family: str | None) -> BertTask:
    """Returns the task of a run; see `megatron_train.tasks.kinds.TaskKind`."""
    training = run.training
    return BertTask(
        stages,
        family,
        seed=training.seed,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
    )
