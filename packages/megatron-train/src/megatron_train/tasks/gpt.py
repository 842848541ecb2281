"""Left-to-right language modelling with a GPT model."""

from collections.abc import Sequence
from typing import Any

from megatron_kernels import Mask
from megatron_models import GPT, gpt_flops
from torch import Tensor, nn

from megatron_train.tasks.task import Batch

LOSS = "lm loss"


class GPTTask:
    """Predict each next token; the loss is cross entropy over the tokens that the mask keeps.

    Args:
        model: the whole model; one stage.
        family: name of its family, kept in checkpoints.
        reset_position_ids: take the positions of the batch instead of counting from 0.
        reset_attention_mask: attend within the documents of the batch instead of across them.
    """

    def __init__(
        self,
        model: GPT,
        family: str | None,
        *,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
    ) -> None:
        self._model = model
        self._family = family
        self._reset_position_ids = reset_position_ids
        self._reset_attention_mask = reset_attention_mask

    @property
    def family(self) -> str | None:
        """Name of the model's family, or None."""
        return self._family

    @property
    def model_config(self) -> dict[str, Any]:
        """The model's configuration as plain values."""
        return self._model.config.to_dict()

    @property
    def stages(self) -> Sequence[nn.Module]:
        """The whole model."""
        return (self._model,)

    def denominators(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the number of tokens that count; 1 where none does, so that the loss is 0."""
        count = sum(float(batch["loss_mask"].double().sum()) for batch in batches)
        return {LOSS: count or 1.0}

    def forward(self, batch: Batch) -> Tensor:
        """Return the cross entropy of each token, ``[b, s]``."""
        positions = batch["positions"] if self._reset_position_ids else None
        mask = Mask(document_ids=batch["document_ids"]) if self._reset_attention_mask else None
        return self._model.loss(batch["tokens"], batch["labels"], positions=positions, mask=mask)

    def loss(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross entropy summed over the tokens that count."""
        return {LOSS: (output * batch["loss_mask"]).sum()}

    def flops(self, batches: Sequence[Batch]) -> float:
        """Return the operations of a forward and backward pass over the batches."""
        length = batches[0]["tokens"].shape[1]
        tokens = sum(batch["tokens"].numel() for batch in batches)
        return float(gpt_flops(self._model.config, length, tokens))
