"""Sequence classification: one label for one or two texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_train.config.run import RunConfig
from megatron_train.tasks.classification_scores import scores
from megatron_train.tasks.encoder import EncoderTask, class_losses
from megatron_train.tasks.task import MicroBatch, field_sum

LOSS, ACCURACY = "classification loss", "accuracy"

_COUNTED = ("hits", "predicted", "labels")
"""What is counted of each class; the arguments of `scores`."""


class ClassificationTask(EncoderTask):
    """Trains the head of whole sequences; the loss is the cross entropy of the label.

    Reports the accuracy, and F1 score and Matthews correlation from the counts of labels,
    predictions and hits of each class over a whole evaluation.

    Args:
        stages: This rank's stages of the model.
        family: Name of the model's family, recorded in checkpoints.
        classes: Number of classes.
        **dropout: Seed and probabilities; see `StagedTask`.
    """

    losses = (LOSS,)

    def __init__(
        self, stages: Sequence[Any], family: str | None, classes: int, **dropout: Any
    ) -> None:
        super().__init__(stages, family, **dropout)
        self._classes = classes
        self.tallies: tuple[str, ...] = tuple(
            _tally(what, number)
            for what in ("hits", "predicted", "labels")
            for number in range(classes)
        )

    @property
    def metrics(self) -> Sequence[str]:
        """The accuracy and the counts of each class."""
        return (ACCURACY, *self.tallies)

    def summaries(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Returns F1 score and Matthews correlation; see `scores`."""
        counts = {
            what: [sums[_tally(what, number)] for number in range(self._classes)]
            for what in _COUNTED
        }
        return scores(**counts)

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float | Tensor]:
        """Returns the number of sequences; those that only complete a batch do not count."""
        count = field_sum(batches, "weights")
        return dict.fromkeys((LOSS, ACCURACY, *self.tallies), count)

    def loss(self, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the sums over sequences.

        Args:
            output: A `megatron_models.EncoderOutput` with logits of sequences ``[b, classes]``.
            batch: The micro-batch.
        """
        labels, weights = batch.fields["classes"], batch.fields["weights"].double()
        predicted = output.sequences.detach().argmax(-1)
        hits = (predicted == labels) * weights
        losses = class_losses(output.sequences, labels)
        found = {LOSS: (losses * weights.to(losses.dtype)).sum(), ACCURACY: hits.sum()}
        counted_by = ((labels, hits), (predicted, weights), (labels, weights))
        classes = torch.arange(self._classes, device=labels.device)
        for what, (counted, weight) in zip(_COUNTED, counted_by, strict=True):
            # Not `bincount`: it waits for the device to know the largest class.
            counts = (weight[:, None] * (counted[:, None] == classes)).sum(0)
            found |= {_tally(what, number): count for number, count in enumerate(counts.unbind())}
        return {name: self._of_sequences(value) for name, value in found.items()}


def _tally(what: str, number: int) -> str:
    return f"{what} of class {number}"


def classification_task(
    run: RunConfig, stages: Sequence[nn.Module], family: str | None
) -> ClassificationTask:
    """Returns the task of a run; see `megatron_train.tasks.kinds.TaskKind`."""
    training = run.training
    return ClassificationTask(
        stages,
        family,
        run.model.num_labels,  # type: ignore[attr-defined]
        seed=training.seed,
        hidden_dropout=training.hidden_dropout,
        attention_dropout=training.attention_dropout,
    )
