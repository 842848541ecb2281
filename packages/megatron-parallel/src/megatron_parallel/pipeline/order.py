"""Who computes what, in which order: plans of pipeline schedules, in pure Python.

`F2` is the forward pass of micro-batch 2, `B2` its backward pass. GPipe (Huang et al. 2019) runs
all forward passes, then all backward passes: every micro-batch is alive at once. 1F1B (Narayanan
et al. 2019; the flush variant of Narayanan et al. 2021) starts with as many forward passes as there
are stages from here to the end, then alternates, so that stage `s` never keeps more than
`stages - s` micro-batches alive. Both leave `(stages - 1) / (micro_batches + stages - 1)` of the
time unused.
"""

from typing import Final, Literal, NamedTuple

from megatron_parallel.layout import LayoutError

SCHEDULES: Final = ("1f1b", "gpipe", "interleaved-1f1b")
"""Names of the schedules a `PipelineEngine` runs; the last one needs several chunks per rank."""


class Action(NamedTuple):
    """One forward ("F") or backward ("B") pass of a stage."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def check_micro_batches(schedule: str, pp: int, vpp: int, micro_batches: int) -> None:
    """Raise `LayoutError`, naming the numbers, if the schedule cannot run that many micro-batches.

    1F1B and GPipe run any number from 1, fewer than there are stages included. Interleaved 1F1B
    goes in `micro_batches // pp` rounds (at least one) of equal length.
    """
    if schedule not in SCHEDULES:
        raise LayoutError(f"no schedule is called {schedule!r}: there are {', '.join(SCHEDULES)}")
    if (vpp > 1) != (schedule == "interleaved-1f1b"):
        raise LayoutError(
            f"schedule {schedule!r} does not fit vpp={vpp}: several chunks per rank need "
            "'interleaved-1f1b', one chunk needs '1f1b' or 'gpipe'"
        )
    if micro_batches < 1:
        raise LayoutError(f"{micro_batches} micro-batches: a step needs at least 1")
    rounds = max(1, micro_batches // pp)
    if schedule == "interleaved-1f1b" and micro_batches % rounds:
        below = micro_batches - micro_batches % rounds
        above = micro_batches + 1
        while above % max(1, above // pp):
            above += 1
        raise LayoutError(
            f"interleaved 1F1B over {pp} ranks cannot run {micro_batches} micro-batches: "
            f"{micro_batches} // {pp} = {rounds} rounds must be equally long; "
            f"use {below} or {above} micro-batches"
        )


def planned_actions(schedule: str, stages: int, stage: int, micro_batches: int) -> list[Action]:
    """What one stage computes, in order, under 1F1B or GPipe."""
    check_micro_batches(schedule, stages, 1, micro_batches)
    if not 0 <= stage < stages:
        raise LayoutError(f"stage {stage} does not exist: there are {stages}")
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    plan = [Action("F", stage, i) for i in range(ahead)]
    for done in range(micro_batches):
        plan.append(Action("B", stage, done))
        if ahead + done < micro_batches:
            plan.append(Action("F", stage, ahead + done))
    return plan


def draw(
    schedule: str, stages: int, micro_batches: int, *, forward: int = 1, backward: int = 2
) -> str:
    """A picture of 1F1B or GPipe: one line per stage, time from left to right, idle time as dots.

    `forward` and `backward` are the lengths of the passes in units of time; communication takes
    none. The last line gives the part of the time in which stages idle, and how many micro-batches
    each keeps alive at most.
    """
    for name, units in (("forward", forward), ("backward", backward)):
        if units < 1:
            raise LayoutError(f"{name}={units}: passes are at least 1 unit of time long")
    length = {"F": forward, "B": backward}
    plans = [planned_actions(schedule, stages, s, micro_batches) for s in range(stages)]
    starts = _start_times(plans, length)
    end = max(starts[action] + length[action.kind] for action in starts)
    cell = len(str(micro_batches - 1)) + 2  # "F12 ": one unit of time
    lines = []
    for stage, plan in enumerate(plans):
        line = ""
        for action in plan:
            line += " .".rjust(cell) * (starts[action] - len(line) // cell)
            fill = "-" if action.kind == "B" else " "
            line += f" {action}".ljust(cell * length[action.kind], fill)
        line += " .".rjust(cell) * (end - len(line) // cell)
        lines.append(f"stage {stage} |{line} |")
    busy = micro_batches * (forward + backward)
    alive = ", ".join(str(_most_alive(plan)) for plan in plans)
    lines.append(f"idle {1 - busy / end:.0%}; micro-batches alive at most, by stage: {alive}")
    return "\n".join(lines)


def _start_times(plans: list[list[Action]], length: dict[str, int]) -> dict[Action, int]:
    """When each pass starts: after the one before it on its stage, with its input there."""
    starts: dict[Action, int] = {}
    free = [0] * len(plans)
    following = [0] * len(plans)
    last = len(plans) - 1
    while any(following[s] < len(plan) for s, plan in enumerate(plans)):
        for s, plan in enumerate(plans):
            if following[s] == len(plan):
                continue
            action = plan[following[s]]
            if action.kind == "F":
                source = action._replace(stage=s - 1) if s else None
            else:
                source = action._replace(stage=s + 1) if s < last else action._replace(kind="F")
            if source is not None and source not in starts:
                continue
            ready = 0 if source is None else starts[source] + length[source.kind]
            starts[action] = max(free[s], ready)
            free[s] = starts[action] + length[action.kind]
            following[s] += 1
    return starts


def _most_alive(plan: list[Action]) -> int:
    alive = most = 0
    for action in plan:
        alive += 1 if action.kind == "F" else -1
        most = max(most, alive)
    return most
