"""One step of this rank: its micro-batches through its stages, gradients summed over all ranks.

    engine = StepEngine(task, mesh)
    optimizer = Optimizer(
        engine.parameters, engine.table, mesh, config,
        gradients=engine.gradients, shards=engine.shards,
    )
    sums = engine.run(micro_batches, denominators, iteration)   # each loss, over all ranks
    optimizer.step(lr)
    engine.zero()

The same path serves every layout. On one rank the pipeline is a plain loop, the gradient buffers
leave gradients where autograd puts them, and nothing communicates.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    InnerLosses,
    Mesh,
    ParameterBuffers,
    Passed,
    PipelineEngine,
    Sharding,
    View,
    all_reduce,
    collect_shardings,
    parameter_views,
)
from megatron_parallel.pipeline import Backward, stage_parameters
from torch import Tensor, nn

from megatron_train.config.run import schedule_of
from megatron_train.tasks.task import Batch, Task


class StepEngine:
    """Forward and backward passes of a step on one rank of a mesh.

    Args:
        task: what is trained; its stages are this rank's.
        mesh: where this rank stands.
        data_parallel: how gradients are summed, and what each rank keeps.
        compile: whether to compile each stage with torch.compile.

    Attributes:
        parameters: this rank's parameters by global name, each of them once; whoever reads them
            outside of `run` and `evaluate` calls `settle` first.
        table: how each is cut.
        buffers: main gradients, one set for each stage of this rank.
        shards: what this rank updates of each stage, where it does not update all.
    """

    def __init__(
        self,
        task: Task,
        mesh: Mesh,
        data_parallel: DataParallelConfig | None = None,
        *,
        compile: bool = False,  # noqa: A002
    ) -> None:
        data_parallel = data_parallel or DataParallelConfig()
        self.task = task
        self.mesh = mesh
        self.parameters = stage_parameters(task.stages)
        self.table: dict[str, Sharding] = {}
        self.buffers: list[GradientBuffers] = []
        self.shards: list[ParameterBuffers] = []
        for stage in task.stages:
            table = collect_shardings(stage)
            self.table.update(table)
            buffers = GradientBuffers(stage.named_parameters(), table, mesh, data_parallel)
            self.buffers.append(buffers)
            if data_parallel.use_distributed_optimizer:
                self.shards.append(ParameterBuffers(stage, buffers, table))
        chunks: list[nn.Module] = list(task.stages)
        if compile:
            chunks = [torch.compile(stage, dynamic=False) for stage in chunks]  # type: ignore[misc]
        self._iteration: int | None = None
        self._inner: InnerLosses | None = None
        self._pipeline = PipelineEngine(
            mesh,
            chunks,
            task.loss,
            inputs=self._inputs,
            passed=self._passed,
            sums=task.losses,
            schedule=schedule_of(mesh.layout),
            around_backward=self._around_backward,
        )

    def denominators(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return what each loss is divided by, counted over the micro-batches of all ranks."""
        # Of whole sequences, which all ranks of the context axis read.
        return self._summed(self.task.denominators(batches), "dp", "token counts")

    def run(
        self, batches: Sequence[Batch], denominators: Mapping[str, float], iteration: int
    ) -> dict[str, float]:
        """Add the gradients of all micro-batches and sum them over all ranks.

        Args:
            batches: this rank's micro-batches.
            denominators: of the global batch.
            iteration: number of the step, from 1; dropout depends on it.

        Returns:
            Each loss summed over the true tokens of the global batch, equal on every rank.
        """
        self._iteration = iteration
        inner = {name: denominators[name] for name in self.task.inner_losses}
        self._inner = InnerLosses(inner) if inner else None
        outer = {name: denominators[name] for name in self.task.losses}
        found = self._pipeline.run([self._own(batch) for batch in batches], outer)
        for buffers in self.buffers:
            buffers.finish()
        sums = self._summed(found, self._data, "loss sums")
        if self._inner is not None:  # every rank has other tokens, or other layers
            sums |= self._summed(self._inner.sums, "world", "inner loss sums")
        return sums

    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return each loss summed over the true tokens of all ranks; makes no gradients."""
        self._iteration = self._inner = None
        sums = self._pipeline.evaluate([self._own(batch) for batch in batches])
        return self._summed(sums, self._data, "loss sums")

    def gradients(self) -> dict[str, Float[Tensor, "..."]]:
        """Return the main gradients after `run`, by global name."""
        return {name: g for buffers in self.buffers for name, g in buffers.gradients().items()}

    def zero(self) -> None:
        """Drop all gradients."""
        for buffers in self.buffers:
            buffers.zero()

    def settle(self) -> None:
        """Return when all weights of the latest step are on this rank."""
        for shards in self.shards:
            shards.settle()

    def views(self) -> dict[str, list[View]]:
        """Return views of all parameters, to save or to load into."""
        self.settle()
        return parameter_views(self.parameters, self.table, self.mesh)

    def _inputs(self, batch: Batch, stage: int) -> Mapping[str, Any]:
        given = self.task.inputs(batch, stage, self._iteration)
        return given if self._inner is None else {**given, "inner": self._inner}

    def _passed(self, batch: Batch, stage: int) -> Passed | tuple[Passed, ...]:
        return self.task.passed(batch, stage)

    def _around_backward(self, backward: Backward) -> AbstractContextManager[object]:
        # No schedule used here splits its backward passes, so hooks see every gradient.
        self.buffers[backward.stage // self.mesh.layout.pp].begin(last=backward.last)
        return nullcontext()

    def _own(self, batch: Batch) -> Batch:
        """What this rank computes of a micro-batch, on its device."""
        device = self.mesh.device
        if device.type != "cpu":
            batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        return batch if self.mesh.layout.cp == 1 else self.task.cut(batch)

    @property
    def _data(self) -> str:
        """The axis of samples and of their parts; called `dp` where samples are not cut."""
        return "dp" if self.mesh.layout.cp == 1 else "dp_cp"

    def _summed(
        self, values: Mapping[str, float | Tensor], axis: str, purpose: str
    ) -> dict[str, float]:
        """Sum numbers over the ranks of an axis, in float64."""
        device = self.mesh.device
        total = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values.values()]
        )
        all_reduce(total, self.mesh.axis(axis), purpose=purpose)
        return dict(zip(values, total.tolist(), strict=True))
