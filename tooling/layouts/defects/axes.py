"""Defects of rotary positions with a time, a height and a width."""

from dataclasses import replace as changed
from typing import Any
from unittest import mock

from megatron_models.components.rotary.module import Angles, RotaryTable
from megatron_parallel import Mesh
from megatron_train import GPTTask
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("height and width are exchanged", "pp2-axes-dropout")
def _exchanged(mesh: Mesh, replace: Replace) -> None:
    true = RotaryTable.forward

    def wrong(self: RotaryTable, length: int, offset: int, positions: Any, *more: Any) -> Angles:
        return true(self, length, offset, positions[[0, 2, 1]], *more)

    replace(RotaryTable, "forward", wrong)


@defect("sections begin one pair of channels later", "tp2·sp-axes")
def _later_sections(mesh: Mesh, replace: Replace) -> None:
    true = RotaryTable._by_axis

    def wrong(self: RotaryTable, tables: Any) -> Tensor:
        axes = self.rotation.axes
        rotation = changed(self.rotation, axes=axes[-1:] + axes[:-1])
        with mock.patch.object(self, "rotation", rotation):
            return true(self, tables)

    replace(RotaryTable, "_by_axis", wrong)


@defect("heights and widths are those of the first tokens of the sequence", "cp2-axes-dropout")
def _first_tokens(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.context_parallel_slice

    def wrong(self: GPTTask, batch: Any) -> Any:
        whole, found = batch.fields["positions"], true(self, batch)
        own = found.fields["positions"].clone()
        own[..., 1:] = whole[:, : own.shape[1], 1:]
        return found.with_fields(positions=own)

    replace(GPTTask, "context_parallel_slice", wrong)
