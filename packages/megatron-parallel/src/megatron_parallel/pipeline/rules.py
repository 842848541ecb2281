"""Pipeline schedules by name: what each needs of layout and micro-batches, in pure Python."""

from dataclasses import dataclass
from typing import Final, Literal

from megatron_parallel.errors import LayoutError
from megatron_parallel.layout import ParallelLayout, StageMapping


@dataclass(frozen=True)
class ScheduleKind:
    """What is known of a schedule before it runs.

    Attributes:
        name: as a `PipelineEngine` and `--pipeline-schedule` take it.
        chunks: how many model chunks a rank holds: `one`, `several`, `two` or `any` number.
        stage_mapping: which rank holds which stage, `ParallelLayout.stage_mapping`.
        splits_backward: whether input and weight gradients are computed apart.
        needs_equal_rounds: whether micro-batches have to come in rounds of equal length, with
            several chunks if not with one.
        takes_group_size: whether the length of these rounds can be chosen.
        overlaps_passes: whether a forward and a backward pass of two micro-batches run together, so
            that one computes while messages of the other are under way (`PassInterleaver`).
        source: where it was described.
    """

    name: str
    chunks: Literal["one", "several", "two", "any"]
    source: str
    stage_mapping: StageMapping = "loop"
    splits_backward: bool = False
    needs_equal_rounds: bool = False
    takes_group_size: bool = False
    overlaps_passes: bool = False

    def supports(self, vpp: int) -> bool:
        """Returns whether a rank may hold that many chunks."""
        return {"one": vpp == 1, "several": vpp > 1, "two": vpp == 2, "any": True}[self.chunks]


_KINDS: Final = (
    ScheduleKind("gpipe", "one", "Huang et al. 2019"),
    ScheduleKind("1f1b", "one", "Narayanan et al. 2019, with the flush of 2021"),
    ScheduleKind(
        "interleaved-1f1b",
        "several",
        "Narayanan et al. 2021",
        needs_equal_rounds=True,
        takes_group_size=True,
    ),
    ScheduleKind(
        "combined-1f1b",
        "any",
        "Megatron-LM's combined 1F1B, 2025",
        needs_equal_rounds=True,
        takes_group_size=True,
        overlaps_passes=True,
    ),
    ScheduleKind("looped-bfs", "any", "Lamy-Poirier 2022"),
    ScheduleKind(
        "zero-bubble", "any", "Qi et al. 2023", splits_backward=True, needs_equal_rounds=True
    ),
    ScheduleKind("zb-v", "two", "Qi et al. 2023, section 6", "v", splits_backward=True),
    ScheduleKind("dualpipe-v", "two", "DeepSeek-AI 2025", "v", splits_backward=True),
)
SCHEDULES: Final = tuple(kind.name for kind in _KINDS)
"""Names of the schedules a `PipelineEngine` runs."""

_WORDS: Final = {"one": "1 chunk", "several": "at least 2 chunks", "two": "exactly 2 chunks"}


def find_schedule_kind(schedule: str) -> ScheduleKind:
    """Returns what is known of a schedule; raises `LayoutError` if there is none of that name."""
    for kind in _KINDS:
        if kind.name == schedule:
            return kind
    raise LayoutError(f"no schedule is called {schedule!r}: there are {', '.join(SCHEDULES)}")


def default_schedule(layout: ParallelLayout) -> str:
    """The schedule of a layout that names none: 1F1B in one of its forms, or ZB-V in a V."""
    if layout.stage_mapping == "v":
        return "zb-v"
    return "interleaved-1f1b" if layout.vpp > 1 else "1f1b"


def check_schedule(schedule: str, vpp: int, stage_mapping: StageMapping | None = None) -> None:
    """Raises `LayoutError` unless the schedule runs on that many chunks, so placed.

    Without `stage_mapping` only the number of chunks is looked at.
    """
    kind = find_schedule_kind(schedule)
    if not kind.supports(vpp):
        fitting = ", ".join(repr(other.name) for other in _KINDS if other.supports(vpp))
        raise LayoutError(
            f"schedule {schedule!r} does not fit vpp={vpp}: it needs {_WORDS[kind.chunks]} per "
            f"rank; vpp={vpp} goes with {fitting}"
        )
    if stage_mapping is not None and stage_mapping != kind.stage_mapping:
        raise LayoutError(
            f"schedule {schedule!r} needs "
            f"ParallelLayout(stage_mapping={kind.stage_mapping!r}), and the layout "
            f"has stage_mapping={stage_mapping!r}"
        )


def effective_schedule(schedule: str, pp: int, micro_batches: int) -> str:
    """The schedule in whose order a step runs: 1F1B with fewer micro-batches than stages is GPipe.

    There 1F1B has no steady state. Its first ranks then send and receive apart what its last ranks
    do at once, and torch takes different NCCL communicators for these two: the step would hang.
    GPipe does the same passes of each rank in the same order of micro-batches.
    """
    return "gpipe" if schedule == "1f1b" and micro_batches < pp else schedule


def check_group_size(schedule: str, pp: int, vpp: int, group_size: int) -> None:
    """Raises `LayoutError` unless the schedule can run groups of that many micro-batches."""
    size = {"group_size": group_size}
    if not find_schedule_kind(schedule).takes_group_size or vpp == 1:
        fitting = " or ".join(repr(kind.name) for kind in _KINDS if kind.takes_group_size)
        raise LayoutError(
            f"{{group_size:=}} needs schedule {fitting} with at least 2 chunks per rank, and there "
            f"is {schedule!r} with vpp={vpp}; leave it out",
            size,
        )
    if group_size < pp:
        raise LayoutError(
            f"{{group_size:=}} is less than pp={pp}, so that ranks would wait for one another in "
            f"every group; give at least {pp}",
            size,
        )


def check_micro_batches(
    schedule: str, pp: int, vpp: int, micro_batches: int, group_size: int | None = None
) -> None:
    """Raises `LayoutError`, naming the numbers, if the schedule cannot run that many micro-batches.

    GPipe, 1F1B, looped BFS and ZB-V run any number from 1, fewer than there are stages included.
    Interleaved 1F1B and zero bubble go in `micro_batches // pp` rounds (at least one) of equal
    length; so does combined 1F1B with several chunks, which needs at least two micro-batches.
    DualPipeV needs as many micro-batches as there are stages.

    With `group_size` interleaved and combined 1F1B go in rounds of that many micro-batches and a
    last one of the rest: a round has as many as the pipeline has ranks, or more. This is
    Megatron-LM's `microbatch_group_size_per_vp_stage`.
    """
    check_schedule(schedule, vpp)
    if pp < 1:
        raise LayoutError(f"{pp} ranks: a pipeline has at least 1")
    if micro_batches < 1:
        raise LayoutError(f"{micro_batches} micro-batches: a step needs at least 1")
    if schedule == "dualpipe-v" and pp > 1 and micro_batches < 2 * pp:
        raise LayoutError(
            f"{schedule} over {pp} ranks cannot run {micro_batches} micro-batches: it needs at "
            f"least one for each of its 2 x {pp} = {2 * pp} stages"
        )
    kind = find_schedule_kind(schedule)
    if kind.overlaps_passes and micro_batches == 1:
        raise LayoutError(
            f"{schedule} cannot run 1 micro-batch: while messages of one are under way another one "
            "computes; use at least 2"
        )
    if group_size is not None:
        check_group_size(schedule, pp, vpp, group_size)
        _check_last_group(schedule, pp, micro_batches, group_size)
        return
    rounds = max(1, micro_batches // pp)
    if kind.needs_equal_rounds and (vpp > 1 or not kind.overlaps_passes) and micro_batches % rounds:
        below = micro_batches - micro_batches % rounds
        above = micro_batches + 1
        while above % max(1, above // pp):
            above += 1
        raise LayoutError(
            f"{schedule} over {pp} ranks cannot run {micro_batches} micro-batches: "
            f"{micro_batches} // {pp} = {rounds} rounds must be equally long; "
            f"use {below} or {above} micro-batches"
        )


def _check_last_group(schedule: str, pp: int, micro_batches: int, group_size: int) -> None:
    """Refuses a step without a whole group, and a last group that is shorter than the pipeline."""
    size = {"group_size": group_size}
    whole, rest = divmod(micro_batches, group_size)
    if not whole:
        raise LayoutError(
            f"{schedule} with {{group_size:=}} cannot run {micro_batches} micro-batches, less than "
            f"one group; use at least {group_size}, or smaller groups",
            size,
        )
    if 0 < rest < pp:
        below = whole * group_size
        raise LayoutError(
            f"{schedule} over {pp} ranks with {{group_size:=}} cannot run {micro_batches} "
            f"micro-batches: the last group has {rest}, fewer than there are ranks; use {below} or "
            f"{below + pp} micro-batches",
            size,
        )
