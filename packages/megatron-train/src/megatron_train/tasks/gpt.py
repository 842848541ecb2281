"""Left-to-right language modelling with a GPT model."""

from collections.abc import Sequence
from typing import Any

from megatron_kernels import Mask
from megatron_models import GPT, gpt_flops
from megatron_parallel import Mesh, vocab_parallel_cross_entropy
from torch import Tensor, nn

from megatron_train.tasks.task import Batch

LOSS = "lm loss"


class GPTTask:
    """Predict each next token; the loss is cross entropy over the tokens that the mask keeps.

    Args:
        model: the whole model; one stage.
        mesh: how its vocabulary is cut.
        family: name of its family, kept in checkpoints.
        reset_position_ids: take the positions of the batch instead of counting from 0.
        reset_attention_mask: attend within the documents of the batch instead of across them.
    """

    def __init__(
        self,
        model: GPT,
        mesh: Mesh,
        family: str | None,
        *,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
    ) -> None:
        self._model = model
        self._vocabulary = mesh.axis("tp")
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

    def inputs(self, batch: Batch, stage: int = 0) -> dict[str, Any]:
        """Return tokens and, where documents are kept apart, positions and mask."""
        arguments: dict[str, Any] = {"tokens": batch["tokens"]}
        if self._reset_position_ids:
            arguments["positions"] = batch["positions"]
        if self._reset_attention_mask:
            arguments["mask"] = Mask(document_ids=batch["document_ids"])
        return arguments

    def loss(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the cross entropy summed over the tokens that count, from logits ``[s, b, v]``."""
        labels, mask = batch["labels"].t(), batch["loss_mask"].t()
        vocab_size = self._model.config.vocab_size
        losses = vocab_parallel_cross_entropy(output, labels, self._vocabulary, vocab_size)
        return {LOSS: (losses * mask).sum()}

    def flops(self, batches: Sequence[Batch]) -> float:
        """Return the operations of a forward and backward pass over the batches."""
        length = batches[0]["tokens"].shape[1]
        tokens = sum(batch["tokens"].numel() for batch in batches)
        return float(gpt_flops(self._model.config, length, tokens))
