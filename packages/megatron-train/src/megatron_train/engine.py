"""The forward and backward passes of one step on this rank, with gradients summed over ranks.

    engine = StepEngine(task, mesh)
    optimizer = Optimizer(engine.stages, config)
    sums = engine.run(micro_batches, denominators, iteration)   # each loss, over all ranks
    optimizer.step(lr)
    engine.stages.zero()

The same code runs in every layout. On one rank the pipeline is a plain loop, gradients stay where
autograd puts them, and nothing is communicated.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from megatron_parallel import (
    AuxiliaryLosses,
    DataParallelConfig,
    Mesh,
    PipelineEngine,
    TrainableChunks,
    all_reduce,
)
from megatron_parallel.data_parallel import GradientFusion, fuse_gradient_accumulation
from megatron_parallel.pipeline import default_schedule, find_schedule_kind
from torch import Tensor, nn

from megatron_train.compiling import (
    CompileScope,
    compile_layers,
    compile_stages,
    require_whole_compiler,
)
from megatron_train.cuda_graphs import GraphBackend
from megatron_train.errors import TrainError
from megatron_train.layer_values import over_all_ranks
from megatron_train.observation import NO_REPORTS, Reports
from megatron_train.split_compiler import SplitBackend
from megatron_train.tasks.task import CountingTask, MicroBatch, PreparingTask, Task
from megatron_train.transfer import pack


@dataclass(frozen=True)
class BatchTotals:
    """The size of a global batch.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens, including masked ones.
        flops: FLOPs of the forward and backward pass.
    """

    samples: int
    tokens: int
    flops: float


AUXILIARY_LOSSES, INTERLEAVER = "auxiliary_losses", "interleaver"
"""Keyword arguments that the engine itself passes to stages."""


class StepEngine:
    """Forward and backward passes of a step on one rank of a mesh.

    Args:
        task: Task with this rank's stages.
        mesh: Mesh of the run.
        data_parallel: Settings of gradient reduction and sharding.
        compile: Whether to compile the stages with torch.compile.
        compile_scope: What is compiled at a time, see `megatron_train.compiling`.
        graphs: Captures layers as CUDA graphs, with `compile_scope` "layer". Defaults to none.
        schedule: Name of the pipeline schedule. Defaults to `default_schedule`.
        group_size: Micro-batches in a row, as for `megatron_parallel.PipelineEngine`.
        per_token: Whether each unmasked token of a step has the same weight. Otherwise each
            micro-batch of each data-parallel rank has the same weight: the loss of a step is the
            mean of the means of micro-batches. Auxiliary losses are per token either way, and
            so is every evaluation.

    Raises:
        TrainError: Two losses or metrics of the task have the same name.

    Attributes:
        stages: This rank's stages with their parameters, gradients and shards.
        fusion: Weights with fused gradient accumulation, and reasons why others have none.
        counts: What layers counted in the last step over the global batch (`CountingTask`), by name
            of the counter: float64 vectors on the device, equal on all ranks.
        maxima: The largest values that layers reported in the last step (`Reports.maxima`), in the
            same form.
    """

    def __init__(
        self,
        task: Task,
        mesh: Mesh,
        data_parallel: DataParallelConfig | None = None,
        *,
        compile: bool = False,  # noqa: A002
        compile_scope: CompileScope = "stage",
        graphs: GraphBackend | None = None,
        schedule: str | None = None,
        group_size: int | None = None,
        per_token: bool = True,
    ) -> None:
        data_parallel = data_parallel or DataParallelConfig()
        sums = (*task.losses, *task.metrics)
        names = Counter((*sums, *task.auxiliary_losses))
        if duplicates := [name for name, count in names.items() if count > 1]:
            raise TrainError(
                f"task {type(task).__name__}: two losses or metrics are called {duplicates[0]!r}; "
                "rename one of them"
            )
        self.task = task
        self.mesh = mesh
        self._per_token, self._compiled = per_token, compile
        self.stages = TrainableChunks(
            task.stages, mesh, data_parallel, self._units, waits_by_unit=compile
        )
        self._counting_task = task if isinstance(task, CountingTask) else None
        self.fusion = self._fuse(data_parallel, compile)
        schedule, self._graphs = schedule or default_schedule(mesh.layout), graphs
        if compile:
            require_whole_compiler(mesh, torch.__version__)
            backend: Callable[..., Any] | None = self._graphs
            if find_schedule_kind(schedule).splits_backward:
                backend = SplitBackend()
            if compile_scope == "stage":
                compile_stages(self.stages.modules)
            else:
                compile_layers(task.stages, self._units, mesh.device, backend)
        self._iteration: int | None = None
        self._auxiliary_losses: AuxiliaryLosses | None = None
        self.counts: dict[str, Float64[Tensor, " values"]] = {}
        self.maxima: dict[str, Float64[Tensor, " values"]] = {}
        self._pipeline = PipelineEngine(
            mesh,
            self.stages.modules,
            self._loss,
            inputs=self._inputs,
            # A task of one stage need not have it.
            stage_output_spec=lambda batch, stage: task.stage_output_spec(batch, stage),  # noqa: PLW0108
            sums=sums,
            schedule=schedule,
            group_size=group_size,
            around_backward=self.stages.around_backward,
        )

    def prepare(self, batches: Sequence[MicroBatch], iteration: int | None) -> Sequence[MicroBatch]:
        """Returns micro-batches with the inputs that the task computes (`PreparingTask`).

        Args:
            batches: This rank's micro-batches as they were read.
            iteration: Number of the step; None in an evaluation.
        """
        if not isinstance(self.task, PreparingTask):
            return batches
        with torch.no_grad():
            return self.task.prepare(batches, iteration)

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, Float64[Tensor, ""]]:
        """Returns the denominators of the sums of `run`, over the micro-batches of all ranks.

        They are on the device, and the host does not wait for them. A denominator is 1 if there is
        nothing to count, for example if all tokens are masked, so that the loss is 0.
        """
        if self.mesh.layout.hybrid_cp:
            found = self.evaluation_denominators(batches)
        else:
            counts = dict(self.task.denominators(batches))
            if not self._per_token:
                counts |= dict.fromkeys(self.task.losses, float(len(batches)))
            found = self._summed(counts, "dp", "token counts")
        return {name: count + (count == 0) for name, count in found.items()}

    def evaluation_denominators(
        self, batches: Sequence[MicroBatch]
    ) -> dict[str, Float64[Tensor, ""]]:
        """Returns the denominators of the sums of `evaluate`, over all ranks, on the device."""
        if self.mesh.layout.hybrid_cp:  # ranks that share documents count equal shares of them
            counts: dict[str, float | Tensor] = dict.fromkeys(self._counted, 0.0)
            for batch in batches:
                ranks = 1 if batch.context_split is None else batch.context_split.ranks
                for name, count in self.task.denominators([batch]).items():
                    counts[name] += count / ranks
            return self._summed(counts, self._data, "token counts")
        # All ranks of the context-parallel axis count whole sequences.
        return self._summed(self.task.denominators(batches), "dp", "token counts")

    def batch_totals(self, batches: Sequence[MicroBatch]) -> BatchTotals:
        """Returns the size of the global batch from this rank's micro-batches."""
        samples = sum(batch.samples for batch in batches)
        tokens = sum(batch.tokens for batch in batches)
        flops = self.task.flops(batches)
        if self.mesh.layout.hybrid_cp:
            local = {"samples": samples, "tokens": tokens, "flops": flops}
            whole = self._summed(local, self._data, "totals of the batch")
            all_samples, all_tokens, all_flops = torch.stack([*whole.values()]).tolist()
            return BatchTotals(int(all_samples), int(all_tokens), all_flops)
        ranks = self.mesh.axis("dp").size  # all have the same number of samples
        return BatchTotals(ranks * samples, ranks * tokens, ranks * flops)

    def run(
        self,
        batches: Sequence[MicroBatch],
        denominators: Mapping[str, float | Tensor],
        iteration: int,
        loss_scale: Tensor | None = None,
        reports: Reports = NO_REPORTS,
    ) -> dict[str, Float64[Tensor, ""]]:
        """Computes the gradients of all micro-batches and sums them over all ranks.

        Args:
            batches: This rank's micro-batches.
            denominators: Denominators of the global batch: numbers, or scalars on the device.
            iteration: Number of the step, from 1; dropout depends on it.
            loss_scale: Factor of all gradients, a scalar on the device. Losses that layers inside
                the model add are scaled too, but sums are not. Defaults to 1.
            reports: What layers report besides, in ``counts`` and ``maxima``. Defaults to nothing.

        Returns:
            The sum of each loss over the unmasked tokens of the global batch, equal on all ranks.
            With `per_token=False`, the sum of the micro-batch means. Metrics are always summed
            over the global batch. The sums are on the device, and the host does not wait for them.
        """
        self._iteration = iteration
        if self._graphs is not None:
            self._graphs.begin_step()
        if loss_scale is not None:
            denominators = {name: below / loss_scale for name, below in denominators.items()}
        auxiliary = {name: denominators[name] for name in self.task.auxiliary_losses}
        counting = self._counting_task
        counters = {**(counting.counters if counting else {}), **reports.counters}
        self._auxiliary_losses, self.counts, self.maxima = None, {}, {}
        if auxiliary or counters or reports.maxima:
            self._auxiliary_losses = AuxiliaryLosses(auxiliary, counters, reports.maxima)
        outer = {name: denominators[name] for name in self.task.losses}
        with self.stages.constant_weights(compiled=self._compiled):
            found = self._pipeline.run([self._weighed(batch) for batch in batches], outer)
        self.stages.finish()
        sums = self._summed(found, self._data, "loss sums")
        if auxiliary and self._auxiliary_losses:  # replicated values are counted on one rank
            sums |= self._summed(self._auxiliary_losses.sums, "world", "auxiliary loss sums")
        if collected := self._auxiliary_losses:
            self.counts = over_all_ranks(self.mesh, collected.counts, counters, "sum")
            self.maxima = over_all_ranks(self.mesh, collected.maxima, reports.maxima, "max")
        return sums

    def evaluate(self, batches: Sequence[MicroBatch]) -> dict[str, Float64[Tensor, ""]]:
        """Returns the sum of each loss over the unmasked tokens of all ranks, without gradients."""
        self._iteration = self._auxiliary_losses = None
        with self.stages.constant_weights(compiled=self._compiled):
            sums = self._pipeline.evaluate([self._own(batch) for batch in batches])
        return self._summed(sums, self._data, "loss sums")

    def _fuse(self, data_parallel: DataParallelConfig, compiled: bool) -> GradientFusion:
        """Turns on fused gradient accumulation, unless settings exclude it."""
        if not data_parallel.gradient_accumulation_fusion:
            return GradientFusion(disabled_reason="--no-gradient-accumulation-fusion")
        if data_parallel.use_torch_fsdp2:
            return GradientFusion(
                disabled_reason="torch's fully_shard (--use-torch-fsdp2) sums gradients itself"
            )
        if compiled:
            return GradientFusion(
                disabled_reason="compiled code (--compile) has no gradient buffers to add to"
            )
        return fuse_gradient_accumulation(self.task.stages, self.stages.buffers)

    def _units(self, stage: nn.Module) -> Sequence[nn.Module]:
        return self.task.fsdp_units(stage)

    def _inputs(self, batch: MicroBatch, stage: int) -> Mapping[str, Any]:
        given = dict(self.task.stage_inputs(batch, stage, self._iteration))
        if reserved := given.keys() & {AUXILIARY_LOSSES, INTERLEAVER}:
            raise TrainError(
                f"task {type(self.task).__name__} gives stage {stage} an argument "
                f"{min(reserved)!r}, which the engine passes; choose another name"
            )
        if self._iteration is None:  # an evaluation
            return given
        if self._auxiliary_losses is not None:
            given[AUXILIARY_LOSSES] = self._auxiliary_losses
        if self._pipeline.interleaver is not None:
            given[INTERLEAVER] = self._pipeline.interleaver
        return given

    def _loss(self, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        """Returns the sums of a micro-batch, divided by its loss denominators if it has any."""
        sums = self.task.loss(output, batch)
        if not batch.loss_denominators:
            return sums
        return {
            name: value / (below.to(value.dtype) if isinstance(below, Tensor) else below)
            for name, value in sums.items()
            for below in [batch.loss_denominators.get(name, 1.0)]
        }

    def _weighed(self, batch: MicroBatch) -> MicroBatch:
        """Returns `_own` with loss denominators, if micro-batches have equal weights."""
        if self._per_token:
            return self._own(batch)
        counts = self.task.denominators([batch])  # over whole sequences
        denominators = {n: counts[n] + (counts[n] == 0) for n in self.task.losses}
        return dataclasses.replace(self._own(batch), loss_denominators=denominators)

    def _own(self, batch: MicroBatch) -> MicroBatch:
        """Returns this rank's slice of a micro-batch on its device."""
        if self._cuts:  # on the host, so that it knows the split without waiting for the device
            batch = self.task.context_parallel_slice(batch)
        device = self.mesh.device
        return batch if device.type == "cpu" else batch.to(device)

    @property
    def _counted(self) -> tuple[str, ...]:
        """The names of losses and metrics, which all have denominators."""
        return (*self.task.losses, *self.task.metrics, *self.task.auxiliary_losses)

    @property
    def _cuts(self) -> bool:
        """Whether micro-batches are split over ranks."""
        return self.mesh.layout.cp > 1 or self.mesh.layout.hybrid_cp

    @property
    def _data(self) -> str:
        """The axis over which losses are summed: `dp`, or `dp_cp` if micro-batches are split."""
        return "dp_cp" if self._cuts else "dp"

    def _summed(
        self, values: Mapping[str, float | Tensor], axis: str, purpose: str
    ) -> dict[str, Float64[Tensor, ""]]:
        """Sums numbers over the ranks of an axis, in float64, without waiting for the device."""
        total = pack(values.values(), self.mesh.device)
        all_reduce(total, self.mesh.axis(axis), purpose=purpose)
        return dict(zip(values, total.unbind(), strict=True))
