"""Defects of vocabulary and position offsets of a rank."""

from typing import Any

import megatron_parallel.tensor_parallel.vocabulary_loss as vocabulary_loss
from megatron_models.components.embedding.module import EmbeddingTable
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import VocabParallelEmbedding
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("the vocabulary offset of the embedding is wrong", "tp2-tied")
def _embedding_offset(mesh: Mesh, replace: Replace) -> None:
    true = VocabParallelEmbedding.forward

    def wrong(self: VocabParallelEmbedding, tokens: Tensor, **options: bool | None) -> Tensor:
        return true(self, tokens + self.axis.index, **options)

    replace(VocabParallelEmbedding, "forward", wrong)


@defect("the vocabulary offset of the targets is wrong", "tp4-untied")
def _target_offset(mesh: Mesh, replace: Replace) -> None:
    true = vocabulary_loss.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, axis: Any, vocab: int, **options: Any) -> Tensor:
        return true(logits, targets - axis.index, axis, vocab, **options)

    replace(vocabulary_loss, "vocab_parallel_cross_entropy", wrong)


@defect("padding of the vocabulary gets probability", "tp2-tied")
def _padding(mesh: Mesh, replace: Replace) -> None:
    true = vocabulary_loss.vocab_parallel_cross_entropy

    def wrong(logits: Tensor, targets: Tensor, axis: Any, vocab: int, **options: Any) -> Tensor:
        return true(logits, targets, axis, logits.shape[-1] * axis.size, **options)

    replace(vocabulary_loss, "vocab_parallel_cross_entropy", wrong)


@defect("positions start at 0 on every sequence-parallel rank", "tp4·sp-tied")
def _position_offset(mesh: Mesh, replace: Replace) -> None:
    true = EmbeddingTable.forward

    def wrong(self: EmbeddingTable, length: int, rows: Any, offset: int) -> Tensor:
        if rows is not None:
            rows = (rows - rows[:, :1]).clamp(min=0)
        return true(self, length, rows, 0)

    replace(EmbeddingTable, "forward", wrong)
