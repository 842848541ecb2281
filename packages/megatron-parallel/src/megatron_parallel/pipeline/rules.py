"""Pipeline schedules by name, and the layouts and numbers of micro-batches that they support.

Pure Python.
"""

from dataclasses import dataclass
from typing import Final, Literal

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.coordinates import StageMapping
from megatron_parallel.mesh.layout import ParallelLayout


@dataclass(frozen=True)
class ScheduleKind:
    """Properties of a schedule.

    Attributes:
        name: As `PipelineEngine` and `--pipeline-schedule` take it.
        chunks: How many model chunks a rank holds: `one`, `several`, `two` or `any` number.
        source: Where it was published.
        stage_mapping: Which rank holds which stage, `ParallelLayout.stage_mapping`.
        splits_backward: Whether it computes input and weight gradients separately.
        needs_equal_rounds: Whether micro-batches must form rounds of equal length, at least with
            several chunks.
        takes_group_size: Whether the length of these rounds can be chosen.
        overlaps_passes: Whether a forward and a backward pass of two micro-batches run together:
            one computes while messages of the other are in flight (`PassInterleaver`).
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
        """Returns whether a rank may hold `vpp` chunks."""
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
"""Names of the schedules that a `PipelineEngine` runs."""

_WORDS: Final = {"one": "1 chunk", "several": "at least 2 chunks", "two": "exactly 2 chunks"}


def find_schedule_kind(schedule: str) -> ScheduleKind:
    """Returns the properties of a schedule; raises `LayoutError` for an unknown name."""
    for kind in _KINDS:
        if kind.name == schedule:
            return kind
    raise LayoutError(f"unknown schedule {schedule!r}: use one of {', '.join(SCHEDULES)}")


def default_schedule(layout: ParallelLayout) -> str:
    """Returns the default schedule of a layout: ZB-V in a V, otherwise 1F1B or interleaved 1F1B."""
    if layout.stage_mapping == "v":
        return "zb-v"
    return "interleaved-1f1b" if layout.vpp > 1 else "1f1b"


def check_schedule(schedule: str, vpp: int, stage_mapping: StageMapping | None = None) -> None:
    """Raises `LayoutError` unless the schedule supports `vpp` and the stage mapping.

    Without `stage_mapping` only `vpp` is checked.
    """
    kind = find_schedule_kind(schedule)
    if not kind.supports(vpp):
        fitting = ", ".join(repr(other.name) for other in _KINDS if other.supports(vpp))
        raise LayoutError(
            f"schedule {schedule!r} does not support {{vpp:=}}: it needs {_WORDS[kind.chunks]} per "
            f"rank; {{vpp:=}} goes with {fitting}",
            {"vpp": vpp},
        )
    if stage_mapping is not None and stage_mapping != kind.stage_mapping:
        raise LayoutError(
            f"schedule {schedule!r} needs "
            f"ParallelLayout(stage_mapping={kind.stage_mapping!r}), and the layout "
            f"has stage_mapping={stage_mapping!r}"
        )


def effective_schedule(schedule: str, pp: int, micro_batches: int) -> str:
    """Returns the schedule in whose order a step runs: GPipe for 1F1B if `micro_batches < pp`.

    With so few micro-batches, 1F1B has no steady state. Its first ranks then send and receive in
    separate calls what its last ranks exchange in one, and torch uses different NCCL communicators
    for the two, so the step would hang. GPipe runs the same passes of each rank, and the same order
    of micro-batches.
    """
    return "gpipe" if schedule == "1f1b" and micro_batches < pp else schedule


def check_group_size(schedule: str, pp: int, vpp: int, group_size: int) -> None:
    """Raises `LayoutError` unless the schedule can run groups of `group_size` micro-batches."""
    size = {"group_size": group_size, "pp": pp, "vpp": vpp}
    if not find_schedule_kind(schedule).takes_group_size or vpp == 1:
        fitting = " or ".join(repr(kind.name) for kind in _KINDS if kind.takes_group_size)
        raise LayoutError(
            f"{{group_size:=}} needs schedule {fitting} with at least 2 chunks per rank, not "
            f"{schedule!r} with {{vpp:=}}; leave it out",
            size,
        )
    if group_size < pp:
        raise LayoutError(
            f"{{group_size:=}} is less than {{pp:=}}, so ranks would wait for one another in every "
            f"group; use at least {pp}",
            size,
        )


def check_micro_batches(
    schedule: str, pp: int, vpp: int, micro_batches: int, group_size: int | None = None
) -> None:
    """Raises `LayoutError`, naming the numbers, if the schedule cannot run that many micro-batches.

    GPipe, 1F1B, looped BFS and ZB-V run any number from 1, also fewer than `pp`. Interleaved 1F1B
    and zero bubble run `micro_batches // pp` rounds (at least one) of equal length. So does
    combined 1F1B with several chunks, which needs at least two micro-batches. DualPipeV needs at
    least `2 pp` micro-batches, one for each stage.

    With `group_size`, interleaved and combined 1F1B run rounds of that many micro-batches, and a
    last round of the rest. Every round has at least `pp` micro-batches. This is Megatron-LM's
    `microbatch_group_size_per_vp_stage`.
    """
    check_schedule(schedule, vpp)
    if pp < 1:
        raise LayoutError(f"{pp} pipeline ranks: use at least 1")
    if micro_batches < 1:
        raise LayoutError(f"{micro_batches} micro-batches: use at least 1 per step")
    if schedule == "dualpipe-v" and pp > 1 and micro_batches < 2 * pp:
        raise LayoutError(
            f"{schedule} over {pp} ranks cannot run {micro_batches} micro-batches: it needs at "
            f"least one for each of its 2 x {pp} = {2 * pp} stages"
        )
    kind = find_schedule_kind(schedule)
    if kind.overlaps_passes and micro_batches == 1:
        raise LayoutError(
            f"{schedule} cannot run 1 micro-batch: it computes one while messages of another are "
            "in flight; use at least 2"
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
            f"{micro_batches} // {pp} = {rounds} rounds must have equal lengths; "
            f"use {below} or {above} micro-batches"
        )


def _check_last_group(schedule: str, pp: int, micro_batches: int, group_size: int) -> None:
    """Raises `LayoutError` for a step without a whole group or a last group shorter than `pp`."""
    size = {"group_size": group_size}
    whole, rest = divmod(micro_batches, group_size)
    if not whole:
        raise LayoutError(
            f"{schedule} with {{group_size:=}} cannot run {micro_batches} micro-batches, fewer "
            f"than one group; use at least {group_size}, or smaller groups",
            size,
        )
    if 0 < rest < pp:
        below = whole * group_size
        raise LayoutError(
            f"{schedule} over {pp} ranks with {{group_size:=}} cannot run {micro_batches} "
            f"micro-batches: the last group has {rest}, fewer than ranks; use {below} or "
            f"{below + pp} micro-batches",
            size,
        )
