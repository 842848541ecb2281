"""Runs the micro-batches of a step through several stages, with torch's schedules.

Imported only where there is a pipeline: importing torch's pipelining takes seconds.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import Tensor, nn

from megatron_parallel._compat import pipelining
from megatron_parallel._compat.pipelining import OverlappedPass, StartedSends
from megatron_parallel.errors import CollectiveError, LayoutError
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.comparison import StepComparison
from megatron_parallel.pipeline.contract import AroundBackward, Inputs, StageOutputSpec, TensorSpec
from megatron_parallel.pipeline.failure import PeerError, PipelineMonitor
from megatron_parallel.pipeline.objective import Objective
from megatron_parallel.pipeline.order import Action, planned_actions, planned_forward_actions
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver
from megatron_parallel.pipeline.schedules import (
    build_forward_schedule,
    build_schedule,
    posts_receives_early,
)
from megatron_parallel.pipeline.shared import broadcast_from_last_stage
from megatron_parallel.pipeline.stage import Stage, StageSpec

CACHED_SHAPES: Final = 8
"""Number of combinations of shapes for which stages and schedules are cached."""


@dataclass(frozen=True)
class _Prepared:
    schedule: Any
    stages: list[Stage]
    plan: list[Action]


class StageRunner:
    """Runs this rank's stages of a pipeline with torch's schedules."""

    def __init__(
        self,
        mesh: Mesh,
        chunks: Sequence[nn.Module],
        objective: Objective,
        *,
        schedule: str,
        group_size: int | None,
        inputs: Inputs,
        stage_output_spec: StageOutputSpec,
        around_backward: AroundBackward,
        interleaver: PassInterleaver | None = None,
    ) -> None:
        self._mesh = mesh
        self._interleaver = interleaver
        self._pp = mesh.axis("pp")
        self._layout = mesh.layout
        self._chunks = dict(zip(mesh.layout.stages(self._pp.index), chunks, strict=True))
        self._objective = objective
        self._schedule, self._group_size = schedule, group_size
        self._inputs = inputs
        self._stage_output_spec = stage_output_spec
        self._around_backward = around_backward
        self._count = self._pp.size * len(chunks)
        self._comparison = StepComparison(mesh)
        self._monitor = PipelineMonitor(mesh, self._count, self._comparison.check)
        self._sends = StartedSends(at_once=len(chunks) > 1)
        self._prepared: OrderedDict[object, _Prepared] = OrderedDict()

    def run(self, micro_batches: Sequence[Any], backward: bool) -> list[Action]:
        """Runs one step and returns this rank's passes.

        Afterwards the totals of the objective are equal on all pipeline ranks.
        """
        monitor = self._monitor
        monitor.begin(())
        try:
            self._comparison.finish()  # of the step before
            with monitor.running():
                output_specs = self._collect_output_specs(micro_batches)
            self._agree(len(micro_batches), output_specs, backward)
            prepared = self._prepare(len(micro_batches), output_specs, backward)
            monitor.begin(prepared.plan if posts_receives_early(prepared.schedule) else ())
            pipelining.run_schedule(
                prepared.schedule, prepared.stages, micro_batches, backward=backward
            )
            broadcast_from_last_stage(self._objective.totals, self._mesh, purpose="loss sums")
            self._comparison.check()
        except Exception as error:
            self._prepared.clear()  # their state is that of an unfinished step
            if isinstance(error, RuntimeError):
                self._comparison.check()
            if monitor.in_user_code:
                monitor.report_error(error)
            elif isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise PeerError(monitor.diagnose(error)) from error
            raise
        return monitor.trace

    def _collect_output_specs(self, micro_batches: Sequence[Any]) -> list[tuple[TensorSpec, ...]]:
        """Returns the output specs of every stage but the last.

        Raises `LayoutError` if two micro-batches of the step differ in them.
        """
        first: list[tuple[TensorSpec, ...]] = []
        for i, micro_batch in enumerate(micro_batches):
            for stage in range(self._count - 1):
                spec = self._stage_output_spec(micro_batch, stage)
                found = (spec,) if isinstance(spec, TensorSpec) else tuple(spec)
                if i == 0:
                    first.append(found)
                elif found != first[stage]:
                    raise LayoutError(
                        "micro-batches of one step must have equal shapes: stage "
                        f"{stage} sends {_text(first[stage])} for micro-batch 0 but "
                        f"{_text(found)} for micro-batch {i}"
                    )
        return first

    def _agree(
        self, count: int, output_specs: list[tuple[TensorSpec, ...]], backward: bool
    ) -> None:
        """Starts comparing the step with those of the other ranks of the pipeline.

        `LayoutError` is raised on all of them, before they hang, if they run different steps.
        """
        values = {
            "the step": f"{'training' if backward else 'evaluation'} under {self._schedule}",
            "the size of groups": str(self._group_size),
            "the sums of the loss": ", ".join(self._objective.names),
            "the number of micro-batches": str(count),
        }
        for stage, specs in enumerate(output_specs):
            values[f"what stage {stage} passes to stage {stage + 1}"] = _text(specs)
        self._comparison.start(values)

    def _prepare(
        self, count: int, output_specs: list[tuple[TensorSpec, ...]], backward: bool
    ) -> _Prepared:
        key = (count, tuple(output_specs), backward)
        if key in self._prepared:
            self._prepared.move_to_end(key)
            return self._prepared[key]
        stages = [self._stage(i, chunk, output_specs) for i, chunk in self._chunks.items()]
        pp, rank, vpp = self._pp.size, self._pp.index, len(stages)
        if backward:
            pair = None if self._interleaver is None else self._pair
            group = self._group_size
            schedule = build_schedule(self._schedule, stages, count, self._add, pair, group)
            plan = planned_actions(self._schedule, pp, rank, count, vpp, group)
        else:
            v = self._layout.stage_mapping == "v"
            schedule = build_forward_schedule(stages, count, self._add, v=v)
            plan = planned_forward_actions(pp, rank, count, vpp, v)
        self._prepared[key] = _Prepared(schedule, stages, plan)
        if len(self._prepared) > CACHED_SHAPES:
            self._prepared.popitem(last=False)
        return self._prepared[key]

    def _stage(
        self, index: int, chunk: nn.Module, output_specs: list[tuple[TensorSpec, ...]]
    ) -> Stage:
        return Stage(
            chunk,
            StageSpec(
                index=index,
                count=self._count,
                input_specs=output_specs[index - 1] if index else (),
                output_specs=output_specs[index] if index < len(output_specs) else (),
            ),
            self._mesh,
            inputs=self._inputs,
            around_backward=self._around_backward,
            monitor=self._monitor,
            sends=self._sends,
        )

    def _pair(self, forward: OverlappedPass, backward: OverlappedPass) -> None:
        """Runs a backward and a forward pass that alternate.

        The backward pass goes first: it starts a message before it computes much.
        """
        with self._monitor.overlapping():
            for each in (forward, backward):
                with self._monitor.awaiting(each.action):
                    each.receive()
            cast(PassInterleaver, self._interleaver).run_pair(backward.run, forward.run)

    def _add(self, output: Any, micro_batch: Any) -> Tensor:
        with self._monitor.running():
            return self._objective.add(output, micro_batch)


def _text(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(spec) for spec in specs)
