"""Defects of the loss: denominators, masks, and the samples themselves."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_data import SequentialSampler
from megatron_parallel import Mesh
from megatron_parallel.pipeline import PipelineEngine
from megatron_parallel.pipeline.objective import Objective
from megatron_train import GPTTask
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
        share = float(micro_batch["loss_mask"].sum()) or 1.0
        return true(self, output, micro_batch) * next(iter(self._denominators.values())) / share / 4

    replace(Objective, "add", wrong)


@defect("accumulated micro-batches are not scaled", "tp2·sp-untied")
def _not_scaled(mesh: Mesh, replace: Replace) -> None:
    true = PipelineEngine.run

    def wrong(self: PipelineEngine, batches: Any, denominators: Mapping[str, float]) -> Any:
        return true(self, batches, {n: d / len(batches) for n, d in denominators.items()})

    replace(PipelineEngine, "run", wrong)


@defect("one rank's loss mask has the other polarity", "dp4-untied")
def _polarity(mesh: Mesh, replace: Replace) -> None:
    true = GPTTask.loss

    def wrong(self: GPTTask, output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if mesh.axis("dp").index == 1:
            batch = {**batch, "loss_mask": 1 - batch["loss_mask"]}
        return true(self, output, batch)

    replace(GPTTask, "loss", wrong)


@defect("every data-parallel rank reads the same samples", "dp4-untied")
def _same_samples(mesh: Mesh, replace: Replace) -> None:
    true = SequentialSampler.__iter__

    def wrong(self: SequentialSampler) -> Iterator[list[int]]:
        self.data_parallel_rank = 0
        return true(self)

    replace(SequentialSampler, "__iter__", wrong)
