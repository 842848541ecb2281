"""Defects of multi-token prediction: denominators, shifted tokens, the embedding of a stage."""

from dataclasses import replace as changed
from typing import Any

import megatron_models.models.gpt.model as gpt
import megatron_train.tasks.gpt as task
from megatron_models.components.layer import TrunkSpec
from megatron_parallel import AuxiliaryLosses, Mesh
from megatron_train import GPTTask, MicroBatch
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("every depth is divided by the labels of the main loss", "pp2-mtp-dropout")
def _main_denominator(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.denominators

    def wrong(self: GPTTask, batches: Any) -> dict[str, float]:
        found = true(self, batches)
        main = found[task.LOSS]
        return {name: main if name.startswith("mtp") else count for name, count in found.items()}

    replace(GPTTask, "denominators", wrong)


@defect("later tokens are those of a rank's slice of the sequence", "cp2-mtp-dropout")
def _shifted_after_the_cut(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask._with_future

    def wrong(self: GPTTask, batch: MicroBatch) -> MicroBatch:
        if batch.context_split is None:
            return batch
        ids = batch.context_split.take(batch.fields["document_ids"], mesh.axis("cp").index)
        found = true(self, batch.with_fields(document_ids=ids)).fields
        return batch.with_fields(**{n: t for n, t in found.items() if n != "document_ids"})

    replace(GPTTask, "_with_future", wrong)


@defect("later tokens come from the next document", "pp2-mtp-dropout")
def _across_documents(mesh: Mesh, replace: Replace) -> None:
    true = task.shift_within_documents
    replace(task, "shift_within_documents", lambda t, depths, ids: true(t, depths))


@defect("the last stage has an embedding of its own", "pp2·dp2·ep2·a2a-moe-mtp-dropout")
def _not_tied(mesh: Mesh, replace: Replace) -> None:
    true = gpt.trunk_stage

    def wrong(*arguments: Any, **options: Any) -> TrunkSpec:
        stage = true(*arguments, **options)
        if stage.embedding is None:
            return stage
        own = changed(stage.embedding, tied_over_stages=False, positions_tied_over_stages=False)
        return changed(stage, embedding=own)

    replace(gpt, "trunk_stage", wrong)


@defect("every tensor-parallel rank counts the loss of a depth", "tp2·sp-mtp-dropout")
def _counted_twice(mesh: Mesh, replace: Replace) -> None:
    true = AuxiliaryLosses.attach

    def wrong(self: AuxiliaryLosses, *arguments: Any, replicated: Any) -> Tensor:
        return true(self, *arguments, replicated=())

    replace(AuxiliaryLosses, "attach", wrong)
