"""Defects of a pool of ranks: uses of the layout's context-parallel size, and rows."""

from dataclasses import replace as changed
from typing import Any

import torch
from megatron_models import Dropout
from megatron_parallel import Mesh
from megatron_parallel.context_parallel import PoolPlan
from megatron_train import GPTTask, MicroBatch
from megatron_train.document_pool import DocumentPool
from megatron_train.engine import StepEngine

from layouts.defects.catalogue import Replace, defect

POOL = "cp2·dp2·hybrid(6)-untied-dropout"


@defect("positions in a pool are those of the layout's context-parallel rank", POOL)
def _static_positions(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.context_parallel_slice

    def wrong(self: GPTTask, batch: MicroBatch) -> MicroBatch:
        index = mesh.axis("cp").index % batch.context_split.ranks
        own = batch.context_split.take(batch.fields["positions"], index)
        return true(self, batch).with_fields(positions=own)

    replace(GPTTask, "context_parallel_slice", wrong)


@defect("rows of a pool are counted by the layout's context-parallel size", POOL)
def _static_denominators(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        counts = self.task.denominators(batches)
        shares = {name: count / mesh.layout.cp for name, count in counts.items()}
        return self._summed(shares, "dp_cp", "token counts")

    replace(StepEngine, "denominators", wrong)


@defect("documents of a row attend to earlier ones", POOL)
def _one_document(mesh: Mesh, replace: Replace) -> None:
    true = DocumentPool.rows

    def wrong(self: DocumentPool, *arguments: Any) -> list[MicroBatch]:
        rows = true(self, *arguments)
        return [
            row.with_fields(document_ids=row.fields["document_ids"].clamp(max=0)) for row in rows
        ]

    replace(DocumentPool, "rows", wrong)


@defect("attention dropout in a row uses indices in the row, not in the sample", POOL)
def _dropout_by_row(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask._dropout

    def wrong(self: GPTTask, *arguments: Any) -> dict[str, Dropout]:
        given = true(self, *arguments)
        return {name: changed(each, indices=None, length=None) for name, each in given.items()}

    replace(GPTTask, "_dropout", wrong)


@defect("a rank's last row is left out", POOL)
def _last_row_left_out(mesh: Mesh, replace: Replace) -> None:
    true = PoolPlan.rows_of

    def wrong(self: PoolPlan, rank: int) -> Any:
        rows = true(self, rank)
        alone = [row is not None and len(row.ranks) == 1 for row in rows]
        last = max((i for i, only in enumerate(alone) if only), default=-1) if rank == 3 else -1
        return tuple(None if i == last else row for i, row in enumerate(rows))

    replace(PoolPlan, "rows_of", wrong)


@defect("a row's labels come from the token after it in the row", POOL)
def _labels_of_row(mesh: Mesh, replace: Replace) -> None:
    true = DocumentPool.rows

    def wrong(self: DocumentPool, *arguments: Any) -> list[MicroBatch]:
        rows = []
        for row in true(self, *arguments):
            tokens, labels = row.fields["tokens"], row.fields["labels"]
            rows.append(row.with_fields(labels=torch.cat([tokens[:, 1:], labels[:, -1:]], 1)))
        return rows

    replace(DocumentPool, "rows", wrong)
