"""Formulas of data parallelism: gradients summed and weights gathered, for each `Job.kept`."""

from collections.abc import Iterator
from typing import NamedTuple

from layouts.traffic.jobs import ALIGNED, BUCKET, ELEMENT, MICRO_BATCHES, Job
from layouts.traffic.parameters import Sizes, blocks, outside, parameters


class Message(NamedTuple):
    """Messages of one purpose in one step of one rank; `nbytes` is over all of them."""

    what: str
    axis: str
    operation: str
    calls: int
    nbytes: int


GRADIENTS, GATHERED = "of gradients", "of parameters"


def data_parallel(job: Job, *, first: bool, last: bool) -> Iterator[Message]:
    """Yields the messages for the parameters of one stage in one step."""
    if job.kept == "fsdp":
        yield from fully_sharded(job, first=first, last=last)
        return
    for kind, sizes in parameters(job, first=first, last=last).items():
        yield from buckets_of(job, kind, sizes)


def buckets_of(job: Job, kind: str, sizes: list[int]) -> Iterator[Message]:
    """Yields the sums of one kind of gradients, in buckets, and the gathers of updated shards."""
    layout, what = job.layout, f"{sum(sizes):,} parameters"
    ranks = layout.expert_dp if kind == "expert" else (layout.dp or 1) * layout.cp
    near = ranks if kind == "expert" else ranks // layout.dp_outer
    data = "expert_dp" if kind == "expert" else "dp" if layout.cp == 1 else "dp_cp"
    filled = buckets(sizes, near)
    calls, whole = len(filled), ELEMENT * sum(filled)
    kept = whole // near if job.kept else whole
    if layout.dp_outer > 1:
        inner, outer, shard = "dp_cp_inner", "dp_cp_outer", whole // near
        yield Message(what, inner, f"reduce_scatter {GRADIENTS}", calls, whole)
        yield Message(what, outer, f"all_reduce {GRADIENTS}", calls, shard)
        purpose = GATHERED if job.kept else GRADIENTS
        yield Message(what, inner, f"all_gather {purpose}", calls, shard)
    elif ranks > 1 and job.kept:
        yield Message(what, data, f"reduce_scatter {GRADIENTS}", calls, whole)
        yield Message(what, data, f"all_gather {GATHERED}", calls, kept)
    elif ranks > 1:
        yield Message(what, data, f"all_reduce {GRADIENTS}", calls, whole)
    further = {"partial": "tp" if layout.tp > 1 else "", "tied": "embedding"}.get(kind)
    if further:
        yield Message(what, further, f"all_reduce {GRADIENTS}", calls, kept)


def fully_sharded(job: Job, *, first: bool, last: bool) -> Iterator[Message]:
    """Yields the gathers of units in every pass and the sums of their gradients.

    All sizes divide evenly.
    """
    data, ranks = ("dp", "dp_cp")[job.layout.cp > 1], (job.layout.dp or 1) * job.layout.cp
    each = [total(block) for block in blocks(job)]
    rest = sum(total(part) for part in outside(job, first=first, last=last))
    passes = MICRO_BATCHES * (2 * sum(each) + rest)
    calls = MICRO_BATCHES * (2 * len(each) + (rest > 0))
    what = "each block twice, the rest once a micro-batch"
    yield Message(what, data, f"all_gather {GATHERED}", calls, ELEMENT * passes // ranks)
    units, whole = len(each) + (rest > 0), sum(each) + rest
    what = f"{whole:,} parameters"
    yield Message(what, data, f"reduce_scatter {GRADIENTS}", units, ELEMENT * whole)
    found = parameters(job, first=first, last=last)
    for kind, axis in (("partial", "tp"), ("tied", "embedding")):
        if kind in found:
            nbytes = ELEMENT * sum(found[kind]) // ranks
            yield Message("a part, at once", axis, f"all_reduce {GRADIENTS}", 1, nbytes)


def total(sizes: Sizes) -> int:
    """Returns the number of elements of all kinds."""
    return sum(map(sum, sizes.values()))


def buckets(sizes: list[int], ranks: int) -> list[int]:
    """Returns the elements of each bucket: whole parameters, from the last one on."""
    filled: list[int] = []
    for size in reversed(sizes):
        if not filled or filled[-1] + size > BUCKET:
            filled.append(0)
        filled[-1] += up_to(size, ALIGNED)
    return [up_to(elements, ALIGNED * ranks) for elements in filled]


def up_to(number: int, step: int) -> int:
    """Returns the next multiple of `step`."""
    return -(-number // step) * step
