"""The pipeline engine: runs one step over micro-batches, on one stage or on several.

    engine = PipelineEngine(mesh, chunks, loss, inputs=inputs, stage_output_spec=stage_output_spec)
    sums = engine.run(micro_batches, {"loss": true_tokens})     # gradients are in .grad
    sums = engine.evaluate(micro_batches)                       # forward only

The loss is a sum. `loss(output, micro_batch)` returns sums by name. A step differentiates the sums
that have a denominator, each divided by it. Denominators are known before the step starts: the
number of true tokens of the *global* batch, over all micro-batches and data-parallel ranks. So
nothing is averaged twice, even if micro-batches have different sizes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.contract import AroundBackward, Inputs, StageOutputSpec, no_context
from megatron_parallel.pipeline.loop import LoopRunner, Runner
from megatron_parallel.pipeline.objective import Loss, Objective
from megatron_parallel.pipeline.order import Action
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver
from megatron_parallel.pipeline.rules import (
    check_group_size,
    check_micro_batches,
    check_schedule,
    find_schedule_kind,
)


class PipelineEngine:
    """Runs the micro-batches of a step through the stages of this rank.

    Args:
        mesh: Its axis `pp` is the pipeline. With `pp=1` everything runs in a plain loop and needs
            no `torch.distributed`.
        chunks: The model chunks of this rank: one module, or `vpp` modules in the order of
            `mesh.layout.stages(rank)`. The first stage is called with keyword arguments only. The
            others are called with the output of the previous stage, then keyword arguments. A stage
            returns the tensor, or tuple of tensors, that it sends to the next stage; the last stage
            returns any value.
        loss: `loss(output, micro_batch)`, called on the last stage, returns the sums by name.
        inputs: `inputs(micro_batch, stage)` returns keyword arguments of a stage.
        stage_output_spec: `stage_output_spec(micro_batch, stage)` returns the `TensorSpec` (or a
            tuple of them) of what `stage` sends to the next stage. Every rank calls it for every
            stage. Required if there is more than one stage.
        sums: Names of the sums that `loss` returns.
        schedule: One of `SCHEDULES` that supports the layout's `vpp` and `stage_mapping`. Under
            `combined-1f1b` the forward pass of one micro-batch and the backward pass of another
            alternate: the model calls `interleaver.switch()` where it is about to wait
            (`Dispatcher.dispatch` takes `interleaver`, too).
        group_size: Number of micro-batches that a chunk runs in a row under interleaved or combined
            1F1B, at least the number of pipeline ranks (Megatron-LM's
            `microbatch_group_size_per_vp_stage`). Longer groups hide more communication and save
            more activations. Defaults to as many groups of equal length as possible.
        around_backward: Returns a context for each pass that adds to gradients. Its argument gives
            the stage and whether the pass is the last one of that stage; from then on a full bucket
            may be reduced. `ChunkGradients.around_backward` is one.

    Raises:
        LayoutError: Chunks, schedule and layout do not fit together.
    """

    def __init__(
        self,
        mesh: Mesh,
        chunks: nn.Module | Sequence[nn.Module],
        loss: Loss,
        *,
        inputs: Inputs,
        stage_output_spec: StageOutputSpec | None = None,
        sums: Sequence[str] = ("loss",),
        schedule: str = "1f1b",
        group_size: int | None = None,
        around_backward: AroundBackward = no_context,
    ) -> None:
        pp, vpp = mesh.layout.pp, mesh.layout.vpp
        self.mesh = mesh
        self.chunks = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
        self.schedule, self.group_size = schedule, group_size
        self.interleaver = (
            PassInterleaver(mesh.device) if find_schedule_kind(schedule).overlaps_passes else None
        )
        """Alternates passes of two micro-batches under a schedule that overlaps them, else None."""
        self.trace: list[Action] = []
        """The passes that this rank ran in the last step, in order."""
        if len(self.chunks) != vpp:
            raise LayoutError(
                f"got {len(self.chunks)} model chunks, but the layout has vpp={vpp}; pass one for "
                "each stage of the pipeline rank"
            )
        check_schedule(schedule, vpp, mesh.layout.stage_mapping)
        if group_size is not None:
            check_group_size(schedule, pp, vpp, group_size)
        self._objective = Objective(loss, sums, mesh.device)
        self._runner: Runner
        if pp == 1:
            self._runner = LoopRunner(
                self.chunks[0], self._objective, inputs, around_backward, self.interleaver
            )
        elif stage_output_spec is None:
            raise LayoutError(
                f"pp={pp} needs `stage_output_spec`, the spec of what one stage sends to the next"
            )
        else:
            from megatron_parallel.pipeline.runner import StageRunner

            self._runner = StageRunner(
                mesh,
                self.chunks,
                self._objective,
                schedule=schedule,
                group_size=group_size,
                inputs=inputs,
                stage_output_spec=stage_output_spec,
                around_backward=around_backward,
                interleaver=self.interleaver,
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of this rank's stages, one for each chunk."""
        return self.mesh.layout.stages(self.mesh.axis("pp").index)

    def run(
        self, micro_batches: Sequence[Any], denominators: Mapping[str, float | Tensor]
    ) -> dict[str, Tensor]:
        """Runs forward and backward passes of all micro-batches; adds gradients to `.grad`.

        Differentiates the sum of `sum / denominator` over micro-batches and the names in
        `denominators`. Sums without a denominator are only reported. Every rank of the pipeline
        calls this with the same number of micro-batches of the same shapes.

        Returns the sums over all micro-batches, not divided, on every rank, as float64 scalars.

        Raises:
            LayoutError: The schedule cannot run that many micro-batches, or ranks disagree on the
                specs of the tensors between stages.
            PeerError: Another rank of the pipeline died, froze or failed.
        """
        if not denominators or not torch.is_grad_enabled():
            raise LayoutError(
                "run() needs a denominator and enabled gradients; evaluate() needs neither"
            )
        layout, count = self.mesh.layout, len(micro_batches)
        check_micro_batches(self.schedule, layout.pp, layout.vpp, count, self.group_size)
        return self._step(micro_batches, denominators, backward=True)

    def evaluate(self, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
        """Runs forward passes of any number of micro-batches; returns the sums as `run` does."""
        if not micro_batches:
            raise LayoutError("0 micro-batches: an evaluation needs at least 1")
        with torch.no_grad():
            return self._step(micro_batches, {}, backward=False)

    def _step(
        self,
        micro_batches: Sequence[Any],
        denominators: Mapping[str, float | Tensor],
        backward: bool,
    ) -> dict[str, Tensor]:
        self._objective.begin(denominators)
        self.trace = self._runner.run(micro_batches, backward)
        return dict(zip(self._objective.names, self._objective.totals.unbind(), strict=True))
