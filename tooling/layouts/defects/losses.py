"""Defects of the loss: denominators, masks, and the samples themselves."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_data import SequentialSampler
from megatron_parallel import Mesh
from megatron_parallel.pipeline import PipelineEngine
from megatron_parallel.pipeline.objective import Objective
from megatron_train import GPTTask, MicroBatch
from megatron_train.engine import StepEngine
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("every rank divides by its own number of tokens: an average of averages", "dp4-untied")
def _average_of_averages(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        own = self.task.denominators(batches)
        return {name: count * self.mesh.axis("dp").size for name, count in own.items()}

    replace(StepEngine, "denominators", wrong)


@defect("every micro-batch is divided by its own number of tokens", "pp2-tied")
def _average_of_micro_batches(mesh: Mesh, replace: Replace) -> None:
    true = Objective.add

    def wrong(self: Objective, output: Any, micro_batch: Any) -> Tensor:
        share = float(micro_batch.fields["loss_mask"].sum()) or 1.0
        return true(self, output, micro_batch) * next(iter(self._denominators.values())) / share / 4

    replace(Objective, "add", wrong)


@defect("a context-parallel rank divides by the tokens of its slice", "cp2·pp2·dp2-tied-dropout")
def _own_part(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        own = self.task.denominators([self.task.context_parallel_slice(batch) for batch in batches])
        return self._summed({n: count * mesh.axis("cp").size for n, count in own.items()}, "dp", "")

    replace(StepEngine, "denominators", wrong)


@defect("denominators count the first micro-batch only", "cp2·pp2·dp2-tied-dropout")
def _first_micro_batch(mesh: Mesh, replace: Replace) -> None:
    true = StepEngine.denominators

    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        return {name: count * len(batches) for name, count in true(self, batches[:1]).items()}

    replace(StepEngine, "denominators", wrong)


@defect("the mean of a micro-batch is over a rank's slice of it", "cp2·pp2·dp2·means-untied")
def _mean_of_own_part(mesh: Mesh, replace: Replace) -> None:
    true = StepEngine._weighed

    def wrong(self: StepEngine, batch: MicroBatch) -> Any:
        own = self.task.denominators([self.task.context_parallel_slice(batch)])
        denominators = {name: 2 * own[name] or 1.0 for name in own}
        return dataclasses.replace(true(self, batch), loss_denominators=denominators)

    replace(StepEngine, "_weighed", wrong)


@defect("the mean of means is over one rank's micro-batches", "cp2·pp2·dp2·means-untied")
def _own_micro_batches(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: StepEngine, batches: Any) -> dict[str, float]:
        return dict.fromkeys(self.task.losses, float(len(batches)))

    replace(StepEngine, "denominators", wrong)


@defect("accumulated micro-batches are not scaled", "tp2·sp-untied")
def _not_scaled(mesh: Mesh, replace: Replace) -> None:
    true = PipelineEngine.run

    def wrong(self: PipelineEngine, batches: Any, denominators: Mapping[str, float]) -> Any:
        return true(self, batches, {n: d / len(batches) for n, d in denominators.items()})

    replace(PipelineEngine, "run", wrong)


@defect("one rank's loss mask is inverted", "dp4-untied")
def _polarity(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.loss

    def wrong(self: GPTTask, output: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
        if mesh.axis("dp").index == 1:
            batch = batch.with_fields(loss_mask=1 - batch.fields["loss_mask"])
        return true(self, output, batch)

    replace(GPTTask, "loss", wrong)


@defect("every data-parallel rank reads the same samples", "dp4-untied")
def _same_samples(mesh: Mesh, replace: Replace) -> None:
    true = SequentialSampler.__iter__

    def wrong(self: SequentialSampler) -> Iterator[list[int]]:
        self.data_parallel_rank = 0
        return true(self)

    replace(SequentialSampler, "__iter__", wrong)
