"""Defects of low-rank adapters: partial gradients, copies, input gradients."""

from dataclasses import replace as changed
from typing import Any

import torch
from megatron_parallel import Mesh, Sharding
from megatron_parallel.tensor_parallel import LoRA

from layouts.defects.catalogue import Replace, defect


def _complete(replace: Replace, name: str) -> None:
    """Marks the gradient of one matrix of every adapter as complete on each rank."""
    true = LoRA.shardings

    def wrong(self: LoRA, weight: Sharding) -> Any:
        found = dict(true(self, weight))
        return found | {name: changed(found[name], partial=None)}

    replace(LoRA, "shardings", wrong)


@defect("the gradient of an adapter's A is not summed over ranks", "tp2·sp·pp2·lora-untied")
def _a_not_summed(mesh: Mesh, replace: Replace) -> None:
    _complete(replace, "lora_a")


@defect("the gradient of an adapter's B is not summed over ranks", "tp2·sp·pp2·lora-untied")
def _b_not_summed(mesh: Mesh, replace: Replace) -> None:
    _complete(replace, "lora_b")


@defect("the adapters of experts are not summed over their ranks", "tp2·dp2·ep2·lora-moe")
def _experts_not_summed(mesh: Mesh, replace: Replace) -> None:
    true = LoRA.shardings

    def wrong(self: LoRA, weight: Sharding) -> Any:
        found = true(self, weight)
        if not weight.experts:
            return found
        return {name: changed(sharding, partial=None) for name, sharding in found.items()}

    replace(LoRA, "shardings", wrong)


@defect("the norm counts copies of an expert's adapter", "tp2·dp2·ep2·lora-moe")
def _copies_counted(mesh: Mesh, replace: Replace) -> None:
    true = Sharding.replica

    def wrong(self: Sharding, mesh: Any, *, sharded: bool = False) -> int:
        copies = self.experts and self.axis is None
        return 0 if copies else true(self, mesh, sharded=sharded)

    replace(Sharding, "replica", wrong)


@defect("the gradient of the input leaves out adapters", "tp2·sp·pp2·lora-untied")
def _input_without_adapter(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: LoRA, dy: torch.Tensor, weights: Any) -> torch.Tensor:
        return dy @ weights[0].flatten(0, -2)

    replace(LoRA, "dgrad", wrong)
