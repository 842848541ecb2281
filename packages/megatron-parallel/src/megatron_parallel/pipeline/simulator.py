"""Simulates when each pass of a pipeline schedule runs, for given durations, in pure Python.

    timeline = simulate("1f1b", pp=4, micro_batches=8)
    timeline.bubble_fraction  # fraction of the ranks' time in which they are idle: 3/11
    timeline.peak_in_flight   # most in-flight micro-batches, by rank: (4, 3, 2, 1)

A rank runs `planned_actions` in order, as in training. A pass starts when the previous one has
ended and its input has arrived. Sending takes time but does not occupy a rank.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.coordinates import stages_of
from megatron_parallel.pipeline.order import Action, planned_action_groups
from megatron_parallel.pipeline.rules import check_micro_batches, find_schedule_kind


@dataclass(frozen=True)
class PassDurations:
    """Durations, all in one unit; passes are those of one stage.

    Attributes:
        forward: A forward pass.
        backward: A whole backward pass.
        weight: The part of `backward` that computes weight gradients, where a schedule splits it.
            Defaults to half.
        send: From the end of a pass until another rank has its result.

    Raises:
        LayoutError: A pass has no duration, or the weight part is not less than the whole.
    """

    forward: float = 1
    backward: float = 2
    weight: float | None = None
    send: float = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if not getattr(self, name) > 0:
                raise LayoutError(f"{{{name}:=}}: use a duration above 0", vars(self))
        if not self.send >= 0:
            raise LayoutError("{send:=} is negative: use 0 or more", vars(self))
        if self.weight is not None and not 0 < self.weight < self.backward:
            raise LayoutError("{weight:=} is not between 0 and {backward:=}", vars(self))

    def duration(self, action: Action) -> Fraction:
        """Returns the duration of a pass."""
        return self.exact_durations[action.kind]

    @property
    def exact_durations(self) -> Mapping[str, Fraction]:
        """Durations by kind of pass, and `send`, as decimal fractions: 0.1 is a tenth."""
        backward = _exact(self.backward)
        weight = backward / 2 if self.weight is None else _exact(self.weight)
        return {
            "F": _exact(self.forward),
            "B": backward,
            "I": backward - weight,
            "W": weight,
            "send": _exact(self.send),
        }


class Event(NamedTuple):
    """A pass and when it ran.

    Of two passes that overlap, each has a share of their time, and the second is `overlapped`. In
    fact both start with the first share and end with the second.
    """

    action: Action
    start: Fraction
    end: Fraction
    overlapped: bool = False


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        schedule: Its name.
        vpp: Number of stages of each rank.
        micro_batches: Number of micro-batches of the step.
        times: The durations of the simulation.
        ranks: The events of each rank, in order.
    """

    schedule: str
    vpp: int
    micro_batches: int
    times: PassDurations
    ranks: tuple[tuple[Event, ...], ...]

    @property
    def end(self) -> Fraction:
        """When the last rank has finished; the first one starts at 0."""
        return max(events[-1].end for events in self.ranks)

    @property
    def bubble_fraction(self) -> Fraction:
        """The bubble: the fraction of the ranks' time from 0 to `end` in which they are idle."""
        busy = sum((e.end - e.start for events in self.ranks for e in events), Fraction())
        return 1 - busy / (self.end * len(self.ranks))

    @property
    def stall_times(self) -> tuple[Fraction, ...]:
        """Time that each rank is idle between its first and last pass."""
        return tuple(
            events[-1].end - events[0].start - sum((e.end - e.start for e in events), Fraction())
            for events in self.ranks
        )

    @property
    def peak_in_flight(self) -> tuple[Fraction, ...]:
        """Most micro-batches in flight on each rank, whose activations it holds.

        One of the `vpp` stages of a rank counts as `1 / vpp`. A split backward pass frees nothing
        before its weight half.
        """
        return tuple(_peak_in_flight(events, self.vpp) for events in self.ranks)


DEFAULT_TIMES: Final = PassDurations()


def simulate(
    schedule: str,
    pp: int,
    micro_batches: int,
    vpp: int = 1,
    times: PassDurations = DEFAULT_TIMES,
    group_size: int | None = None,
) -> Timeline:
    """Simulates a step; arguments as for `planned_actions`.

    Raises:
        LayoutError: The schedule cannot run these numbers.
    """
    check_micro_batches(schedule, pp, vpp, micro_batches, group_size)
    ranks = range(pp)
    plans = [planned_action_groups(schedule, pp, r, micro_batches, vpp, group_size) for r in ranks]
    stage_mapping = find_schedule_kind(schedule).stage_mapping if pp > 1 else "loop"
    holder = {s: r for r in range(pp) for s in stages_of(stage_mapping, pp, vpp, r)}
    ends: dict[Action, Fraction] = {}
    done: list[list[Event]] = [[] for _ in plans]
    queues = [deque(plan) for plan in plans]
    while any(queues):
        before = len(ends)
        for queue, events in zip(queues, done, strict=True):
            while queue:
                ready = [_ready(action, ends, holder, times) for action in queue[0]]
                arrived = [time for time in ready if time is not None]
                if len(arrived) < len(ready):
                    break
                start = max(*arrived, events[-1].end if events else Fraction())
                together = queue.popleft()
                for action in together:
                    end = start + times.duration(action)
                    events.append(Event(action, start, end, action is not together[0]))
                    start = end
                ends |= dict.fromkeys(together, start)
        if len(ends) == before:
            raise LayoutError(f"{schedule} over {pp} ranks deadlocks after {before} passes")
    return Timeline(schedule, vpp, micro_batches, times, tuple(map(tuple, done)))


def _ready(
    action: Action, ends: Mapping[Action, Fraction], holder: Mapping[int, int], times: PassDurations
) -> Fraction | None:
    """Returns when the input of a pass arrives; None if the pass that computes it has not run."""
    if action.kind == "W":
        return ends.get(action._replace(kind="I"))
    step = -1 if action.kind == "F" else 1
    source = action.stage + step
    if source not in holder:  # the first stage's forward, the last stage's backward pass
        return Fraction() if action.kind == "F" else ends.get(action._replace(kind="F"))
    kinds = ("F",) if action.kind == "F" else ("B", "I")
    found = [ends.get(Action(kind, source, action.micro_batch)) for kind in kinds]  # type: ignore[arg-type]
    computed = [end for end in found if end is not None]
    if not computed:
        return None
    return computed[0] + (
        times.exact_durations["send"] if holder[source] != holder[action.stage] else 0
    )


def _peak_in_flight(events: tuple[Event, ...], vpp: int) -> Fraction:
    alive = most = 0
    for event in events:
        alive += {"F": 1, "B": -1, "W": -1}.get(event.action.kind, 0)
        most = max(most, alive)
    return Fraction(most, vpp)


def _exact(number: float) -> Fraction:
    return Fraction(str(number))
