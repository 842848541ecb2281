"""The order in which each rank runs its passes under a pipeline schedule, in pure Python.

`F2` is the forward pass of micro-batch 2, `B2` its backward pass. A split backward pass is `I2`
(input gradients) and, later, `W2` (weight gradients). Some orders are those of torch's own
schedules; the others are passed to torch as lists. Tests compare them with torch's and with what
ranks ran.
"""

from collections import Counter
from typing import Literal, NamedTuple

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.coordinates import stages_of
from megatron_parallel.pipeline.rules import (
    check_micro_batches,
    effective_schedule,
    find_schedule_kind,
)

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of a stage: forward (F), backward (B), or half of a backward pass (I, W)."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def planned_actions(
    schedule: str,
    pp: int,
    rank: int,
    micro_batches: int,
    vpp: int = 1,
    group_size: int | None = None,
) -> list[Action]:
    """Returns the passes of one pipeline rank in a training step, in order.

    Of two passes that overlap, the forward pass comes first.

    Args:
        schedule: One of `SCHEDULES`.
        pp: Number of pipeline ranks.
        rank: Which of them.
        micro_batches: Number of micro-batches in the step.
        vpp: Number of stages of each rank.
        group_size: Number of micro-batches that a chunk runs in a row, as for
            `check_micro_batches`.

    Raises:
        LayoutError: There is no such rank, or the schedule cannot run these numbers.
    """
    turns = planned_action_groups(schedule, pp, rank, micro_batches, vpp, group_size)
    return [action for together in turns for action in together]


def planned_action_groups(
    schedule: str,
    pp: int,
    rank: int,
    micro_batches: int,
    vpp: int = 1,
    group_size: int | None = None,
) -> list[tuple[Action, ...]]:
    """Returns `planned_actions` grouped: a forward and a backward pass that overlap are one tuple.

    Raises:
        LayoutError: There is no such rank, or the schedule cannot run these numbers.
    """
    check_micro_batches(schedule, pp, vpp, micro_batches, group_size)
    if not 0 <= rank < pp:
        raise LayoutError(f"rank {rank} does not exist: the pipeline has {pp} ranks")
    length = group_size or _round_length(pp, micro_batches)
    if schedule == "combined-1f1b":
        length = length if vpp > 1 else micro_batches  # one chunk needs no rounds
        return _combined(stages_of("loop", pp, vpp, rank), pp, rank, micro_batches, length)
    if schedule == "interleaved-1f1b" and pp > 1:
        stages = stages_of("loop", pp, vpp, rank)
        plan = _interleaved(stages, pp, rank, micro_batches, length)
    else:
        plan = _alone(schedule, pp, rank, micro_batches, vpp)
    return [(action,) for action in plan]


def _alone(schedule: str, pp: int, rank: int, micro_batches: int, vpp: int) -> list[Action]:
    """Returns the plan of a schedule that overlaps no passes, other than interleaved 1F1B."""
    if pp == 1:  # the engine runs a plain loop
        return [a for i in range(micro_batches) for a in (Action("F", 0, i), Action("B", 0, i))]
    stages = stages_of(find_schedule_kind(schedule).stage_mapping, pp, vpp, rank)
    if schedule in ("gpipe", "1f1b"):
        gpipe = effective_schedule(schedule, pp, micro_batches) == "gpipe"
        ahead = micro_batches if gpipe else pp - rank
        return _one_chunk(rank, micro_batches, ahead)
    if schedule == "looped-bfs":
        return _breadth_first(stages, micro_batches)
    if schedule == "zero-bubble":
        return _zero_bubble(stages, pp, rank, micro_batches)
    if schedule == "zb-v":
        return _zb_v(stages, pp, rank, micro_batches)
    return _dualpipe_v(stages, pp, rank, micro_batches)


def planned_forward_actions(
    pp: int, rank: int, micro_batches: int, vpp: int, v: bool
) -> list[Action]:
    """Returns the passes of one rank in an evaluation: forward passes only, of any number."""
    schedule = "zb-v" if v else "looped-bfs"
    plan = planned_actions(schedule, pp, rank, micro_batches, vpp)
    return [action for action in plan if action.kind == "F"]


def _one_chunk(stage: int, micro_batches: int, ahead: int) -> list[Action]:
    """Returns `ahead` forward passes, then backward and forward passes alternately.

    That is 1F1B, or GPipe if all forward passes are ahead.
    """
    plan = [Action("F", stage, i) for i in range(ahead)]
    for done in range(micro_batches):
        plan.append(Action("B", stage, done))
        if ahead + done < micro_batches:
            plan.append(Action("F", stage, ahead + done))
    return plan


def _breadth_first(stages: tuple[int, ...], micro_batches: int) -> list[Action]:
    """Returns all micro-batches through one chunk before the next chunk; backward in reverse."""
    forward = [Action("F", stage, i) for stage in stages for i in range(micro_batches)]
    return forward + [Action("B", stage, i) for _, stage, i in reversed(forward)]


def _round_length(pp: int, micro_batches: int) -> int:
    """Returns the number of micro-batches in each of the equal rounds, at least `pp`."""
    return micro_batches // max(1, micro_batches // pp)


def _in_rounds(
    kind: Kind, stages: tuple[int, ...], length: int, micro_batches: int
) -> list[Action]:
    """Returns the passes of each chunk for a round of micro-batches, then those of the next round.

    The last round may be shorter. Forward passes are Megatron-LM's `get_schedule_table`.
    """
    return [
        Action(kind, stage, i)
        for first in range(0, micro_batches, length)
        for stage in stages
        for i in range(first, min(first + length, micro_batches))
    ]


def _interleaved(
    stages: tuple[int, ...], pp: int, rank: int, micro_batches: int, length: int
) -> list[Action]:
    """Returns 1F1B over chunks: Narayanan et al. 2021, section 2.2.

    Each rank runs two more warm-up forward passes than the next rank.
    """
    forward = _in_rounds("F", stages, length, micro_batches)
    backward = _in_rounds("B", stages[::-1], length, micro_batches)
    ahead = _ahead(stages, length, micro_batches, 2 * (pp - 1 - rank))
    plan = forward[:ahead]
    for done, action in enumerate(backward):
        plan += [*forward[ahead + done : ahead + done + 1], action]
    return plan


def _combined(
    stages: tuple[int, ...], pp: int, rank: int, micro_batches: int, length: int
) -> list[tuple[Action, ...]]:
    """Returns 1F1B, interleaved or not, one more forward pass ahead, so that passes form pairs.

    A pair sends its results only after both of its passes. Each rank must therefore be two forward
    passes ahead of the next, and the last rank's backward pass must not be paired with the forward
    pass that it needs.
    """
    forward = _in_rounds("F", stages, length, micro_batches)
    backward = _in_rounds("B", stages[::-1], length, micro_batches)
    ahead = _ahead(stages, length, micro_batches, 2 * (pp - 1 - rank) + 1)
    pairs = list(zip(forward[ahead:], backward, strict=False))
    return [
        *((action,) for action in forward[:ahead]),
        *pairs,
        *((action,) for action in backward[len(pairs) :]),
    ]


def _zero_bubble(stages: tuple[int, ...], pp: int, rank: int, micro_batches: int) -> list[Action]:
    """Returns ZB-H1 of Qi et al. 2023: weight gradients fill the gaps.

    No rank has more micro-batches in flight than the first rank of 1F1B.
    """
    length = _round_length(pp, micro_batches)
    forward = _in_rounds("F", stages, length, micro_batches)
    backward = _in_rounds("I", stages[::-1], length, micro_batches)
    ahead = _ahead(stages, length, micro_batches, pp - 1 - rank)
    plan = forward[:ahead]
    for done, action in enumerate(backward):
        plan += [*forward[ahead + done : ahead + done + 1], action]
        if done >= rank:
            plan.append(backward[done - rank]._replace(kind="W"))
    late = backward[max(0, len(backward) - rank) :]
    return plan + [action._replace(kind="W") for action in late]


def _ahead(stages: tuple[int, ...], length: int, micro_batches: int, more: int) -> int:
    """Returns the number of warm-up forward passes, before forward and backward passes alternate.

    That is one round of all chunks but one, plus `more`.
    """
    return min((len(stages) - 1) * length + more, len(stages) * micro_batches)


class _Plan:
    """A plan in which every pass of a chunk takes the next micro-batch of its kind."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: Counter[tuple[str, int]] = Counter()
        self._split: list[Action] = []  # input halves whose weight halves are not in the plan yet

    def add(self, words: str, times: int = 1) -> None:
        """Adds passes given as kind and chunk, as in `F0 I1 W1`. `W` alone is the oldest left."""
        for word in words.split() * times:
            if word == "W":
                if self._split:
                    self._append("W", self._split[0].stage)
            else:
                self._append(word[0], self._stages[int(word[1])])

    def done(self, kind: str, chunk: int) -> int:
        """Returns the number of passes of a kind so far."""
        return self._next[kind, self._stages[chunk]]

    def _append(self, kind: str, stage: int) -> None:
        counted = "I" if kind == "B" else kind
        action = Action(kind, stage, self._next[counted, stage])  # type: ignore[arg-type]
        self.actions.append(action)
        self._next[counted, stage] += 1
        if kind == "B":
            self._next["W", stage] += 1
        elif kind == "I":
            self._split.append(action)
        elif kind == "W":
            self._split.remove(action._replace(kind="I"))


def _zb_v(stages: tuple[int, ...], pp: int, rank: int, micro_batches: int) -> list[Action]:
    """Returns ZB-V: each rank has one stage on the way down and one on the way up.

    The pattern is defined for at least `2 pp - 1` micro-batches; for fewer, the missing ones are
    left out.
    """
    count, below = max(2 * pp - 1, micro_batches), pp - rank
    plan = _Plan(stages)
    plan.add("F0", 2 * below - 1)
    plan.add("F1 F0", rank)
    plan.add("F1 I1 W1", below)
    while plan.done("F", 1) < plan.done("F", 0) or plan.done("F", 0) < count:
        plan.add("F0", int(plan.done("F", 0) < count))
        plan.add("I0 W0 F1 I1 W1")
    plan.add("I0 I1", rank)
    plan.add("I0 W0", below)
    for chunk in (1, 0):
        plan.add(f"W{chunk}", plan.done("I", chunk) - plan.done("W", chunk))
    return [action for action in plan.actions if action.micro_batch < micro_batches]


def _dualpipe_v(stages: tuple[int, ...], pp: int, rank: int, micro_batches: int) -> list[Action]:
    """Returns DualPipeV: in the middle, forward of one chunk goes with backward of the other."""
    below = pp - 1 - rank
    plan = _Plan(stages)
    plan.add("F0", 2 * below)
    plan.add("F0 F1", rank + 1)
    plan.add("I1 W F1", below)
    plan.add("F0 B1 F1 B0", micro_batches - 2 * pp + rank + 1)
    plan.add("B1 F1 B0", below)
    # The second half of the last backward passes is split, chunk 0 first on every other rank.
    passes = ["B1", "B0"] * (rank + 1)
    split_from = (rank + 1) // 2 * 2 + (rank % 2 == 0)
    for number, word in enumerate(passes):
        plan.add(word.replace("B", "I") if number >= split_from else word)
    plan.add("W I0" if split_from < len(passes) else "W B0", below)
    plan.add("W", rank + 1)
    return plan.actions
