"""Defects of products in few bits: scales that are not those of all ranks and micro-batches."""

from dataclasses import replace as changed
from typing import Any
from weakref import WeakKeyDictionary

import megatron_models.low_precision.delayed as delayed
import megatron_parallel.sharding.step_state as state
from megatron_models.low_precision.delayed import LayerDelayedProduct
from megatron_models.low_precision.held_weight import HeldWeight
from megatron_parallel import Mesh, Sharding
from megatron_parallel.mesh.axes import Axis
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect(
    "histories of magnitudes are not combined over tensor-parallel ranks",
    "tp2·sp·fp8-untied-dropout",
)
def _histories_of_parts(mesh: Mesh, replace: Replace) -> None:
    true = delayed.history_sharding

    def wrong(weight: Sharding, length: int) -> Sharding:
        return changed(true(weight, length), partial=None)

    replace(delayed, "history_sharding", wrong)


@defect(
    "histories of magnitudes are not combined over data-parallel ranks",
    "tp2·dp2·sharded·fp8-tied",
)
def _histories_of_samples(mesh: Mesh, replace: Replace) -> None:
    true = state._reduction_axes

    def wrong(sharding: Sharding, mesh: Mesh) -> list[Axis]:
        return [axis for axis in true(sharding, mesh) if axis.name == sharding.partial]

    replace(state, "_reduction_axes", wrong)


@defect(
    "a history has the magnitudes of the last micro-batch alone",
    "tp2·sp·fp8-untied-dropout",
)
def _last_micro_batch(mesh: Mesh, replace: Replace) -> None:
    true = LayerDelayedProduct._observe

    def wrong(self: LayerDelayedProduct, *operands: Any) -> None:
        self.history.reset()
        true(self, *operands)

    replace(LayerDelayedProduct, "_observe", wrong)


@defect("weights in few bits stay those of the first step", "tp2·sp·dp2·gathered·fp8-untied")
def _weights_of_the_first_step(mesh: Mesh, replace: Replace) -> None:
    true, first = HeldWeight.of, WeakKeyDictionary[HeldWeight, Any]()

    def wrong(self: HeldWeight, weight: Tensor, convert: Any) -> Any:
        return first.setdefault(self, true(self, weight, convert))

    replace(HeldWeight, "of", wrong)
