"""What a rank communicates in one step, by formula; `gradients` and `experts` have their own."""

import math
from collections.abc import Iterator

from megatron_parallel import ParallelLayout

from layouts.traffic.experts import Routed, routed_layers
from layouts.traffic.gradients import Message, data_parallel
from layouts.traffic.jobs import ELEMENT, LENGTH, MICRO_BATCHES, NUMBER, SAMPLES, Job

Totals = dict[tuple[str, str], tuple[int, int]]
"""Number of calls and bytes over all of them, by axis and operation."""


def formula(job: Job, rank: int) -> list[Message]:
    """Returns what `rank` communicates in one step."""
    layout = job.layout
    stages = range(layout.coordinates(rank).pp, layout.pp * layout.vpp, layout.pp)
    ends = [{"first": n == 0, "last": n == layout.pp * layout.vpp - 1} for n in stages]
    found = [message for end in ends for message in activations(job, **end)]
    found += [message for end in ends for message in data_parallel(job, **end)]
    found += scalars(layout, job.losses)
    return [message for message in found if message.calls]


def activations(job: Job, *, first: bool, last: bool) -> Iterator[Message]:
    """Yields the messages of forward and backward passes of all micro-batches through one stage."""
    t, m = job.layout.tp, MICRO_BATCHES
    layers = job.config.num_layers // (job.layout.pp * job.layout.vpp)
    tokens = LENGTH // job.layout.cp * SAMPLES
    whole = tokens * job.config.hidden_size * ELEMENT  # s b h
    part = whole // t if job.sequence_parallel else whole
    each = 2 if job.config.num_experts else 4  # experts have their own messages
    if t > 1:
        pairs = m * (each * layers + first + last)
        what = f"{each} each layer, 1 embedding, 1 output"
        if job.sequence_parallel:
            # Inputs of column-parallel layers are gathered again in the backward pass.
            gathered = pairs + m * (each // 2 * layers + last)
            gathers = f"{each + each // 2} each layer, 1 embedding, 2 output"
            yield Message(gathers, "tp", "all_gather", gathered, gathered * part)
            yield Message(what, "tp", "reduce_scatter", pairs, pairs * whole)
        else:
            yield Message(what, "tp", "all_reduce", pairs, pairs * whole)
        if last:
            what = "3 numbers each token, in 2"
            yield Message(what, "tp", "all_reduce of token losses", 2 * m, m * 3 * tokens * ELEMENT)
    yield from attention(job, m * layers, tokens)
    if job.config.num_experts:
        routed = Routed(job.config, job.layout, job.dispatcher, m * layers, tokens // t, ELEMENT)
        yield from (Message(*message) for message in routed_layers(routed))
    what = "1 each micro-batch and border"
    borders = {
        "send of activations": not last,
        "receive of activations": not first,
        "send of gradient": not first,
        "receive of gradient": not last,
    }
    for operation, exists in borders.items():
        yield Message(what, "pp", operation, m * exists, m * exists * part)


def attention(job: Job, passes: int, tokens: int) -> Iterator[Message]:
    """Yields the messages of attention over context ranks; `passes` is micro-batches x layers."""
    c, ranks = job.config, job.layout.cp
    if ranks == 1:
        return
    heads, groups = (n // job.layout.tp for n in (c.num_attention_heads, c.num_query_groups))
    head = tokens * c.kv_channels * ELEMENT
    pair = 2 * groups * head
    if job.comm == "allgather":
        yield Message("1 each layer", "cp", "all_gather", passes, passes * pair)
        yield Message("1 each layer", "cp", "reduce_scatter", passes, passes * ranks * pair)
    elif job.comm == "a2a":
        copied = 2 * math.lcm(groups, ranks) * head
        moved = 2 * passes * (2 * heads * head + copied)
        yield Message("4 each layer", "cp", "all_to_all of heads", 4 * passes, moved)
    else:
        steps = passes * (ranks - 1)
        for verb in ("send", "receive"):
            what, after = "2 each layer and step of the ring", "1 each layer and step of the ring"
            operation = f"{verb} of keys and values"
            yield Message(what, "cp", operation, 2 * steps, 2 * steps * pair)
            operation = f"{verb} of gradients of keys and values"
            yield Message(after, "cp", operation, steps, steps * pair)


def scalars(layout: ParallelLayout, losses: int = 1) -> Iterator[Message]:
    """Yields numbers that all ranks need once a step, 8 bytes each; a denominator for each loss."""
    samples, world = (layout.dp or 1) * layout.cp, layout.world_size
    stage = layout.tp * samples
    data = "dp" if layout.cp == 1 else "dp_cp"
    if (layout.dp or 1) > 1:
        what = "numbers of true tokens"
        yield Message(what, "dp", "all_reduce of token counts", 1, NUMBER * losses)
    if losses > 1 and world > 1:
        yield Message("auxiliary losses", "world", "all_reduce of auxiliary loss sums", 1, NUMBER)
    for what, axis, operation, ranks in (
        ("loss", data, "all_reduce of loss sums", samples),
        ("gradient norm of a stage", "tp_dp_cp", "all_reduce of gradient norm", stage),
        ("gradient norm", "pp", "all_reduce of gradient norm", layout.pp),
        ("step digest", "pp", "all_gather of step digest", layout.pp),
        ("loss of the last stage", "pp", "broadcast of loss sums", layout.pp),
        ("whether to stop", "world", "all_reduce of requests to stop", world),
    ):
        yield Message(what, axis, operation, int(ranks != 1), NUMBER * (ranks != 1))


def added(messages: list[Message], times: int = 1) -> Totals:
    """Returns the messages by the keys of `Mesh.counting`."""
    totals: Totals = {}
    for message in messages:
        calls, nbytes = totals.get(message[1:3], (0, 0))
        totals[message[1:3]] = calls + times * message.calls, nbytes + times * message.nbytes
    return totals
