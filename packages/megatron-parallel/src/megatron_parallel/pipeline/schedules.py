"""torch's schedules, by name, and what this rank will compute under them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.distributed.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from megatron_parallel import _compat
from megatron_parallel.pipeline.order import Action
from megatron_parallel.pipeline.stage import Stage


def build_schedule(
    name: str, stages: Sequence[Stage], micro_batches: int, loss: Callable[..., Tensor]
) -> Any:
    """torch's schedule object. Gradients are not scaled: the loss is a sum over its denominator."""
    if name == "1f1b":
        return _compat.schedule_1f1b(stages[0], micro_batches, loss)
    if name == "gpipe":
        return ScheduleGPipe(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B(list(stages), micro_batches, loss_fn=loss, scale_grads=False)


def build_forward_schedule(
    stages: Sequence[Stage], micro_batches: int, loss: Callable[..., Tensor]
) -> Any:
    """A schedule to run without backward passes: any number of micro-batches, one after another."""
    if len(stages) == 1:
        return ScheduleGPipe(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
    return ScheduleLoopedBFS(list(stages), micro_batches, loss_fn=loss, scale_grads=False)


def actions_ahead(schedule: Any, backward: bool) -> list[Action]:
    """What this rank will compute under a schedule of several chunks; `[]` for one chunk.

    With one chunk a rank receives what it needs next, so there is nothing to look up.
    """
    if not isinstance(schedule, PipelineScheduleMulti):
        return []
    kinds: dict[str, Literal["F", "B"]] = {"F": "F", "B": "B"} if backward else {"F": "F"}
    plan = []
    for entry in schedule.pipeline_order[schedule.rank]:
        if entry is None or entry.microbatch_index is None:
            continue
        kind = kinds.get(entry.computation_type.value)
        if kind is not None:
            plan.append(Action(kind, entry.stage_index, entry.microbatch_index))
    return plan
