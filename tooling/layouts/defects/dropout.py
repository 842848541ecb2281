"""Defects of dropout masks, which must equal those of one rank in every layout."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import megatron_parallel.recompute.saved_tensors as saved_tensors
import torch
from megatron_models.components.attention.module import Attention
from megatron_models.components.dropout import ProbabilityDropout
from megatron_parallel import DropoutKey, Mesh
from megatron_train import GPTTask
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


def drop_otherwise(
    replace: Replace, changed: Callable[[ProbabilityDropout], ProbabilityDropout]
) -> None:
    """Makes attention drop the elements of another `ProbabilityDropout`, whole and in parts."""
    for name in ("__call__", "kept"):
        true = getattr(ProbabilityDropout, name)

        def wrong(self: ProbabilityDropout, *given: Any, true: Any = true) -> Tensor:
            found: Tensor = true(changed(self), *given)
            return found

        replace(ProbabilityDropout, name, wrong)


@defect("the dropout mask ignores the slice of the sequence", "tp2·sp-tied-dropout")
def _mask_of_part(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: DropoutKey, axis: Any) -> DropoutKey:
        return self.narrow(0, self.word0.shape[0] // axis.size)

    replace(DropoutKey, "shard", wrong)


@defect("attention dropout ignores which heads a rank has", "tp4·sp-untied-dropout")
def _mask_of_heads(mesh: Mesh, replace: Replace) -> None:
    drop_otherwise(replace, lambda own: dataclasses.replace(own, first_head=0))


@defect("the dropout mask is that of the rank's own batch", "dp2-tied-dropout")
def _mask_of_own_batch(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.stage_inputs

    def wrong(self: GPTTask, batch: Any, stage: int, iteration: int | None) -> Mapping[str, Any]:
        numbers = batch.fields["sample_ids"] % batch.samples
        return true(self, batch.with_fields(sample_ids=numbers), stage, iteration)

    replace(GPTTask, "stage_inputs", wrong)


@defect("a stage counts its layers from 0 in the dropout mask", "pp2-untied-dropout")
def _mask_of_local_layer(mesh: Mesh, replace: Replace) -> None:
    true = Attention.forward

    def wrong(self: Attention, *arguments: Any) -> Tensor:
        own = self.dropout_layer
        self.dropout_layer = own - 2 * mesh.axis("pp").index
        try:
            return true(self, *arguments)
        finally:
            self.dropout_layer = own

    replace(Attention, "forward", wrong)


@defect("recomputation drops other elements than the forward pass", "tp2·sp·selective-tied-dropout")
def _mask_of_second_run(mesh: Mesh, replace: Replace) -> None:
    def changed(own: ProbabilityDropout) -> ProbabilityDropout:
        again = torch._C._current_graph_task_id() >= 0  # in a backward pass
        return dataclasses.replace(own, layer=own.layer + 1000 * again)

    drop_otherwise(replace, changed)


@defect("sharded saved activations are gathered in another order", "tp2·cut-tied-dropout")
def _parts_in_another_order(mesh: Mesh, replace: Replace) -> None:
    true = saved_tensors.all_gather

    def wrong(part: Tensor, axis: Any, *, purpose: str) -> Tensor:
        return true(part, axis, purpose=purpose).unflatten(0, (axis.size, -1)).flip(0).flatten()

    replace(saved_tensors, "all_gather", wrong)
