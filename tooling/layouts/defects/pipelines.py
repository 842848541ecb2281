"""Defects of pipelines: layers of a stage, sums of gradients, inputs of later stages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import megatron_models.models.gpt.model as gpt
from megatron_models import GPTConfig
from megatron_models.stages import StagePlan
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.pipeline import BackwardPass, ChunkGradients, split_backward
from megatron_train import GPTTask
from torch import Tensor
from torch.nn import Parameter

from layouts.defects.catalogue import Replace, defect

ZBV = "pp2·vpp2·dp2·gathered·zb-v-tied"


@defect("buckets are summed before the last weight gradients of a split backward pass", ZBV)
def _sum_before_weights(mesh: Mesh, replace: Replace) -> None:
    true = ChunkGradients.around_backward

    def wrong(self: ChunkGradients, backward: BackwardPass) -> AbstractContextManager[None]:
        if not (backward.split and backward.last and backward.stage > 0):  # there hooks notice
            return true(self, backward)
        self._of_stage[backward.stage].start_reductions()
        return nullcontext()

    replace(ChunkGradients, "around_backward", wrong)


@defect("a weight that two stages of a rank share is counted twice", ZBV)
def _shared_twice(mesh: Mesh, replace: Replace) -> None:
    true = ChunkGradients.gradients

    def wrong(self: ChunkGradients) -> dict[str, Tensor]:
        found = true(self)
        return found | {name: 2 * found[name] for name in self._shared & found.keys()}

    replace(ChunkGradients, "gradients", wrong)


@defect("the upper stages of a V have the layers of a loop", "pp2·vpp2·zb-v-untied-dropout")
def _loop_in_a_v(mesh: Mesh, replace: Replace) -> None:
    def wrong(plan: StagePlan, config: GPTConfig, layout: ParallelLayout, split: Any) -> range:
        return split[5 - plan.stage] if plan.stage >= layout.pp else plan.layers

    _with_layers(replace, wrong)


@defect("a layer is dropped when stages are uneven", "pp4·vpp2-tied-dropout")
def _dropped_layer(mesh: Mesh, replace: Replace) -> None:
    def wrong(plan: StagePlan, config: GPTConfig, layout: ParallelLayout, split: Any) -> range:
        return range(plan.layers.start, plan.layers.stop - plan.last)

    _with_layers(replace, wrong)


@defect(
    "weight gradients of experts keep the memory order of transposed weights",
    "pp2·dp2·ep2·a2a·zero-bubble-moe-dropout",
)
def _transposed_gradients(mesh: Mesh, replace: Replace) -> None:
    def wrong(weights: Sequence[Parameter], found: Any, other: Any) -> None:
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient

    replace(split_backward, "_add_up", wrong)


def _with_layers(replace: Replace, change: Callable[..., range]) -> None:
    true = gpt.plan_stage

    def wrong(
        config: GPTConfig, layout: ParallelLayout, rank: int, chunk: int = 0, split: Any = None
    ) -> StagePlan:
        plan = true(config, layout, rank, chunk, split)
        return StagePlan(plan.stage, plan.count, change(plan, config, layout, split))

    replace(gpt, "plan_stage", wrong)


@defect("positions of later stages are one token behind", "pp2-untied-dropout")
def _positions_of_later_stages(mesh: Mesh, replace: Replace) -> None:
    # Counting from 0 would go unseen: rotary positions are relative, and documents kept apart.
    _with_input(replace, "positions", lambda positions: positions.roll(1, dims=1))


@defect("later stages attend across documents", "pp2-tied")
def _mask_of_later_stages(mesh: Mesh, replace: Replace) -> None:
    _with_input(replace, "mask", lambda mask: None)


def _with_input(replace: Replace, name: str, change: Callable[[Any], Any]) -> None:
    true = GPTTask.stage_inputs

    def wrong(self: GPTTask, batch: Any, stage: int, iteration: int | None) -> Mapping[str, Any]:
        given = true(self, batch, stage, iteration)
        return {**given, name: change(given[name])} if stage > 0 else given

    replace(GPTTask, "stage_inputs", wrong)
