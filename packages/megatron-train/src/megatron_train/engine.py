"""One step of this rank: its micro-batches through its stages, gradients summed over all ranks.

    engine = StepEngine(task, mesh)
    optimizer = Optimizer(engine.stages, config)
    sums = engine.run(micro_batches, denominators, iteration)   # each loss, over all ranks
    optimizer.step(lr)
    engine.stages.zero()

The same path serves every layout. On one rank the pipeline is a plain loop, the gradient buffers
leave gradients where autograd puts them, and nothing communicates.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from megatron_parallel import (
    AuxiliaryLosses,
    DataParallelConfig,
    Mesh,
    PipelineEngine,
    TensorSpec,
    TrainableChunks,
    all_reduce,
)
from megatron_parallel.data_parallel import GradientFusion, fuse_gradient_accumulation
from megatron_parallel.pipeline import default_schedule
from torch import Tensor, nn

from megatron_train.errors import TrainError
from megatron_train.tasks.task import MicroBatch, PreparingTask, Task


@dataclass(frozen=True)
class BatchTotals:
    """How large a global batch is.

    Attributes:
        samples: in it.
        tokens: in these, masked ones included.
        flops: operations of its forward and backward pass.
    """

    samples: int
    tokens: int
    flops: float


AUXILIARY_LOSSES, INTERLEAVER = "auxiliary_losses", "interleaver"
"""Keyword arguments that the engine itself gives to stages."""


class StepEngine:
    """Forward and backward passes of a step on one rank of a mesh.

    Args:
        task: what is trained; its stages are this rank's.
        mesh: where this rank stands.
        data_parallel: how gradients are summed, and what each rank keeps.
        compile: whether to compile each stage with torch.compile.
        schedule: of the pipeline. Defaults to that of `default_schedule`.
        group_size: micro-batches in a row, as for `megatron_parallel.PipelineEngine`.
        per_token: whether every true token of a step has the same weight. Otherwise every
            micro-batch of every data-parallel rank has, however many true tokens are in it: the
            loss of a step is a mean of their means. Auxiliary losses are per token either way, and
            so is every evaluation.

    Raises:
        TrainError: the task gives one name to two losses or reported sums.

    Attributes:
        stages: this rank's stages with their parameters, gradients and shards.
        fusion: which weights' gradients are added up by the products that make them, and why not.
    """

    def __init__(
        self,
        task: Task,
        mesh: Mesh,
        data_parallel: DataParallelConfig | None = None,
        *,
        compile: bool = False,  # noqa: A002
        schedule: str | None = None,
        group_size: int | None = None,
        per_token: bool = True,
    ) -> None:
        data_parallel = data_parallel or DataParallelConfig()
        sums = (*task.losses, *task.metrics)
        names = Counter((*sums, *task.auxiliary_losses))
        if twice := [name for name, count in names.items() if count > 1]:
            raise TrainError(
                f"task {type(task).__name__}: two losses or reported sums are called {twice[0]!r}; "
                "give them two names"
            )
        self.task = task
        self.mesh = mesh
        self._per_token = per_token
        self.stages = TrainableChunks(task.stages, mesh, data_parallel, self._units)
        chunks = self.stages.modules
        self.fusion = self._fuse(data_parallel, compile)
        if compile:
            _require_whole_compiler(mesh, torch.__version__)
            chunks = [torch.compile(stage, dynamic=False) for stage in chunks]  # type: ignore[misc]
        self._iteration: int | None = None
        self._auxiliary_losses: AuxiliaryLosses | None = None
        self._pipeline = PipelineEngine(
            mesh,
            chunks,
            self._loss,
            inputs=self._inputs,
            stage_output_spec=self._stage_output_spec,
            sums=sums,
            schedule=schedule or default_schedule(mesh.layout),
            group_size=group_size,
            around_backward=self.stages.around_backward,
        )

    def prepare(self, batches: Sequence[MicroBatch], iteration: int | None) -> Sequence[MicroBatch]:
        """Returns micro-batches with what the task computes for them (`PreparingTask`).

        Args:
            batches: this rank's, as they were read.
            iteration: number of the step, or None in an evaluation.
        """
        if not isinstance(self.task, PreparingTask):
            return batches
        with torch.no_grad():
            return self.task.prepare(batches, iteration)

    def denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return what each sum of `run` is to be divided by, for the micro-batches of all ranks."""
        if self.mesh.layout.hybrid_cp:
            return self.evaluation_denominators(batches)
        counts = self.task.denominators(batches)
        if not self._per_token:
            counts |= dict.fromkeys(self.task.losses, float(len(batches)))
        return self._count(counts, "dp", "token counts")

    def evaluation_denominators(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Returns what each sum of `evaluate` is to be divided by."""
        if self.mesh.layout.hybrid_cp:  # rows, of which each of their ranks has an equal share
            counts = dict.fromkeys(self._counted, 0.0)
            for batch in batches:
                ranks = 1 if batch.context_split is None else batch.context_split.ranks
                for name, count in self.task.denominators([batch]).items():
                    counts[name] += count / ranks
            return self._count(counts, self._data, "token counts")
        # Of whole sequences, which all ranks of the context axis read.
        return self._count(self.task.denominators(batches), "dp", "token counts")

    def batch_totals(self, batches: Sequence[MicroBatch]) -> BatchTotals:
        """Returns how large the global batch is that these are this rank's micro-batches of."""
        samples = sum(batch.samples for batch in batches)
        tokens = sum(batch.tokens for batch in batches)
        flops = self.task.flops(batches)
        if self.mesh.layout.hybrid_cp:
            own = {"samples": samples, "tokens": tokens, "flops": flops}
            whole = self._count(own, self._data, "totals of the batch")
            return BatchTotals(int(whole["samples"]), int(whole["tokens"]), whole["flops"])
        ranks = self.mesh.axis("dp").size  # each has as many samples as this one
        return BatchTotals(ranks * samples, ranks * tokens, ranks * flops)

    def run(
        self, batches: Sequence[MicroBatch], denominators: Mapping[str, float], iteration: int
    ) -> dict[str, Float64[Tensor, ""]]:
        """Adds the gradients of all micro-batches and sum them over all ranks.

        Args:
            batches: this rank's micro-batches.
            denominators: of the global batch.
            iteration: number of the step, from 1; dropout depends on it.

        Returns:
            Each loss summed over the true tokens of the global batch, equal on every rank and on
            its device: the host does not wait for them. Where
            micro-batches have equal weights, the sum of the means of all micro-batches. Reported
            sums are over the global batch either way.
        """
        self._iteration = iteration
        auxiliary = {name: denominators[name] for name in self.task.auxiliary_losses}
        self._auxiliary_losses = AuxiliaryLosses(auxiliary) if auxiliary else None
        outer = {name: denominators[name] for name in self.task.losses}
        found = self._pipeline.run([self._weighed(batch) for batch in batches], outer)
        self.stages.finish()
        sums = self._summed(found, self._data, "loss sums")
        if self._auxiliary_losses is not None:  # replicated values are counted on one rank
            sums |= self._summed(self._auxiliary_losses.sums, "world", "auxiliary loss sums")
        return sums

    def evaluate(self, batches: Sequence[MicroBatch]) -> dict[str, Float64[Tensor, ""]]:
        """Returns each loss summed over the true tokens of all ranks; makes no gradients."""
        self._iteration = self._auxiliary_losses = None
        sums = self._pipeline.evaluate([self._own(batch) for batch in batches])
        return self._summed(sums, self._data, "loss sums")

    def _fuse(self, data_parallel: DataParallelConfig, compiled: bool) -> GradientFusion:
        """Lets products add up the gradients of their weights, where nothing stands against it."""
        if not data_parallel.gradient_accumulation_fusion:
            return GradientFusion(disabled_reason="--no-gradient-accumulation-fusion")
        if data_parallel.use_torch_fsdp2:
            return GradientFusion(
                disabled_reason="torch's fully_shard (--use-torch-fsdp2) adds gradients up itself"
            )
        if compiled:
            return GradientFusion(
                disabled_reason="code that torch.compile makes (--compile) has no buffers to add to"
            )
        return fuse_gradient_accumulation(self.task.stages, self.stages.buffers)

    def _units(self, stage: nn.Module) -> Sequence[nn.Module]:
        return self.task.fsdp_units(stage)

    def _inputs(self, batch: MicroBatch, stage: int) -> Mapping[str, Any]:
        given = dict(self.task.stage_inputs(batch, stage, self._iteration))
        if taken := given.keys() & {AUXILIARY_LOSSES, INTERLEAVER}:
            raise TrainError(
                f"task {type(self.task).__name__} gives stage {stage} an argument {min(taken)!r}, "
                "which the engine gives; choose another name"
            )
        if self._iteration is None:  # an evaluation
            return given
        if self._auxiliary_losses is not None:
            given[AUXILIARY_LOSSES] = self._auxiliary_losses
        if self._pipeline.interleaver is not None:
            given[INTERLEAVER] = self._pipeline.interleaver
        return given

    def _stage_output_spec(
        self, batch: MicroBatch, stage: int
    ) -> TensorSpec | tuple[TensorSpec, ...]:
        return self.task.stage_output_spec(batch, stage)

    def _loss(self, output: Any, batch: MicroBatch) -> dict[str, Tensor]:
        """Sums of a micro-batch; of each loss, or of its part of the micro-batch's mean."""
        sums = self.task.loss(output, batch)
        if not batch.loss_denominators:
            return sums
        return {
            name: value / batch.loss_denominators.get(name, 1.0) for name, value in sums.items()
        }

    def _weighed(self, batch: MicroBatch) -> MicroBatch:
        """`_own`, with what the mean of the whole micro-batch is divided by where it counts."""
        if self._per_token:
            return self._own(batch)
        counts = self.task.denominators([batch])  # of whole sequences
        denominators = {name: counts[name] or 1.0 for name in self.task.losses}
        return dataclasses.replace(self._own(batch), loss_denominators=denominators)

    def _own(self, batch: MicroBatch) -> MicroBatch:
        """Returns what this rank computes of a micro-batch, on its device."""
        device = self.mesh.device
        if device.type != "cpu":
            batch = batch.to(device)
        return self.task.context_parallel_slice(batch) if self._cuts else batch

    @property
    def _counted(self) -> tuple[str, ...]:
        """Names of all that has a denominator."""
        return (*self.task.losses, *self.task.metrics, *self.task.auxiliary_losses)

    @property
    def _cuts(self) -> bool:
        """Whether micro-batches are cut over ranks."""
        return self.mesh.layout.cp > 1 or self.mesh.layout.hybrid_cp

    @property
    def _data(self) -> str:
        """The axis of samples and of their parts; called `dp` where samples are not cut."""
        return "dp_cp" if self._cuts else "dp"

    def _count(self, values: Mapping[str, float], axis: str, purpose: str) -> dict[str, float]:
        """Sums numbers over the ranks of an axis; the host waits for them."""
        return {name: float(total) for name, total in self._summed(values, axis, purpose).items()}

    def _summed(
        self, values: Mapping[str, float | Tensor], axis: str, purpose: str
    ) -> dict[str, Float64[Tensor, ""]]:
        """Sums numbers over the ranks of an axis, in float64."""
        device = self.mesh.device
        total = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values.values()]
        )
        all_reduce(total, self.mesh.axis(axis), purpose=purpose)
        return dict(zip(values, total.unbind(), strict=True))


def _require_whole_compiler(mesh: Mesh, version: str) -> None:
    """Refuses what torch before 2.13 compiles without an error to gradients of zero.

    Of functions whose result was last changed in place, as collectives change theirs.
    """
    major, minor = (int(number) for number in version.split(".")[:2])
    if mesh.world_size > 1 and (major, minor) < (2, 13):
        raise TrainError(
            f"--compile on {mesh.world_size} ranks needs torch 2.13 or later: torch {version} "
            "compiles collectives to functions without a gradient; update torch, or leave "
            "--compile out"
        )
