"""torch's schedules by name, and our own schedules that torch runs."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from megatron_parallel._compat.pipelining import OverlappedPass, build_planned_schedule
from megatron_parallel.pipeline.order import planned_action_groups
from megatron_parallel.pipeline.rules import effective_schedule, find_schedule_kind
from megatron_parallel.pipeline.stage import Stage

_OF_ONE: Final[dict[str, Callable[..., Any]]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_OF_CHUNKS: Final[dict[str, Callable[..., Any]]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


RunPair = Callable[[OverlappedPass, OverlappedPass], None]
"""Runs a forward and a backward pass of two micro-batches that alternate."""


def build_schedule(
    name: str,
    stages: Sequence[Stage],
    micro_batches: int,
    loss: Callable[..., Tensor],
    run_pair: RunPair | None = None,
    group_size: int | None = None,
) -> Any:
    """Returns torch's schedule object. It does not scale gradients: the loss is already divided.

    `run_pair` is required for schedules that overlap passes. torch's interleaved schedule chooses
    its rounds itself, so with a `group_size` torch runs our plan.
    """
    if group_size is not None or (
        run_pair is not None and find_schedule_kind(name).overlaps_passes
    ):
        pp, vpp = stages[0].group_size, len(stages)
        ranks = range(pp)
        plans = [
            planned_action_groups(name, pp, rank, micro_batches, vpp, group_size) for rank in ranks
        ]
        return build_planned_schedule(stages, micro_batches, loss, plans, run_pair)
    order = effective_schedule(name, stages[0].group_size, micro_batches)
    if (single := _OF_ONE.get(order)) is not None:
        (stage,) = stages
        return single(stage, micro_batches, loss_fn=loss, scale_grads=False)
    return _OF_CHUNKS[name](list(stages), micro_batches, loss_fn=loss, scale_grads=False)


def posts_receives_early(schedule: Any) -> bool:
    """Returns whether a rank posts receives ahead of the pass that it runs next."""
    return isinstance(schedule, PipelineScheduleMulti)


def build_forward_schedule(
    stages: Sequence[Stage], micro_batches: int, loss: Callable[..., Tensor], *, v: bool
) -> Any:
    """Returns a schedule that runs forward passes of any number of micro-batches."""
    return build_schedule("zb-v" if v else "looped-bfs", stages, micro_batches, loss)
