"""Defects of encoders: the token that a head reads, the place of norms, and losses of sequences."""

from itertools import chain
from typing import Any

from megatron_models.components.block import Block
from megatron_models.components.heads import module
from megatron_parallel import Mesh
from megatron_train.tasks.encoder import EncoderTask
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("the pooler reads the first token of every rank", "tp2·sp-bert-post-dropout")
def _first_token_of_every_rank(mesh: Mesh, replace: Replace) -> None:
    true = module.pooling_weights

    def wrong(pooling: Any, indices: Tensor, *others: Any) -> Tensor:
        return true(pooling, indices - indices[:, :1], *others)

    replace(module, "pooling_weights", wrong)


@defect("norms precede sublayers instead of following the sum", "pp2·dp2-bert-post-dropout")
def _norms_before(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: Block, x: Tensor, added: None, context: Any) -> tuple[Tensor, None]:
        for group in self.groups:
            normed = x
            for sublayer in chain.from_iterable(group):
                normed = getattr(self, f"{sublayer.name}_norm_sum")(normed)
            outputs = [self._outputs(readers, normed, added, context)[0] for readers in group]
            x = x + sum(outputs[1:], start=outputs[0])
        return x, added

    replace(Block, "_run", wrong)


@defect("every context-parallel rank counts the loss of a sequence", "cp2-bert-dropout")
def _sequences_count_twice(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: EncoderTask, value: Tensor) -> Tensor:
        return value

    replace(EncoderTask, "_of_sequences", wrong)
