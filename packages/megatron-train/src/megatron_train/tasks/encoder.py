"""What tasks on padded sequences share: inputs of stages, and cuts for context parallelism."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from megatron_kernels import Mask
from megatron_models import training_flops
from megatron_parallel.context_parallel import ContextSplit
from torch import Tensor
from torch.nn import functional

from megatron_train.tasks.staged import StagedTask
from megatron_train.tasks.task import MicroBatch


class EncoderTask(StagedTask):
    """Base of tasks whose samples are padded sequences ``tokens`` with ``document_ids``."""

    auxiliary_losses: tuple[str, ...] = ()
    cut_fields: ClassVar[tuple[str, ...]] = ("tokens", "token_types")
    """Fields ``[b, s]`` of which a context-parallel rank has a part."""

    def context_parallel_slice(self, batch: MicroBatch) -> MicroBatch:
        """Returns this context-parallel rank's slice of a micro-batch.

        ``document_ids``, from which masks are made, stay whole.
        """
        axis, fields, split = self._mesh.axis("cp"), batch.fields, batch.context_split
        if split is None:
            tokens = fields["tokens"]
            split = ContextSplit.zigzag(tokens.shape[1], axis.size, tokens.device)
            split = split.with_documents(fields["document_ids"])
        own = {name: split.take(fields[name], axis.index) for name in self.cut_fields}
        return dataclasses.replace(batch.with_fields(**own), context_split=split)

    def stage_inputs(
        self, batch: MicroBatch, stage: int, iteration: int | None
    ) -> Mapping[str, Any]:
        """Returns the keyword arguments of a stage; the first one gets tokens and their types."""
        module, fields = self._stage(stage), batch.fields
        causal = not any(mixer.bidirectional for mixer in self._model.mixers)
        found: dict[str, Any] = {
            "mask": Mask(causal=causal, document_ids=fields["document_ids"]),
            **self._dropout(batch, iteration),
        }
        if module.first:
            found["x"] = fields["tokens"]
            if getattr(self._model, "num_tokentypes", 0):
                found["token_types"] = fields["token_types"]
        if batch.context_split is not None:
            found["split"] = batch.context_split
        return found

    def flops(self, batches: list[MicroBatch]) -> float:
        """Returns the FLOPs of a forward and backward pass over the micro-batches."""
        length = batches[0].fields["document_ids"].shape[1]
        tokens = sum(batch.tokens for batch in batches)
        return float(training_flops(self._model, length, tokens))

    def _of_sequences(self, value: Tensor) -> Tensor:
        """Returns a sum over sequences that counts once, although every cp rank has it."""
        return value * (self._mesh.axis("cp").index == 0)


def class_losses(logits: Float[Tensor, "b n"], classes: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Returns the cross entropy of each sequence, at least in float32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), classes, reduction="none")
