"""What a training step communicates, counted and by formula, on every rank.

    python -m layouts.traffic [--write docs/parallelism.md]

Counted by `Mesh.counting` around whole steps of megatron-train. The formulas know nothing of how
the code goes about it: they are arithmetic on the sizes of the model, the batch and the layout.
Their derivation is the section "Communication" of `docs/parallelism.md`.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from megatron_models import GPTConfig, gpt_chunks
from megatron_optim import LearningRateSchedule, Optimizer, OptimizerConfig, WeightDecaySchedule
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from megatron_train import GPTTask, Trainer
from megatron_train.engine import StepEngine
from megatron_train.tasks.task import Batch
from tqdm import tqdm

from layouts.output import publish
from layouts.traffic_experts import Routed, routed_layers, routed_parameters

STEPS = 2
"""Of a run that is counted: were the first step another than the second, no formula would fit."""

MICRO_BATCHES, SAMPLES, LENGTH = 4, 2, 32
"""Of a step on one rank: m, b and s."""

_SIZES = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 1000,  # 1024 in memory
    "max_position_embeddings": 64,
}
MODELS = {
    "tied": GPTConfig(**_SIZES),
    "untied": GPTConfig(
        **_SIZES,
        ffn_hidden_size=640,
        num_query_groups=4,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    ),
    "moe": GPTConfig(
        **_SIZES,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        num_experts=4,
        moe_router_topk=4,
        moe_ffn_hidden_size=160,
        moe_aux_loss_coeff=0.01,
    ),
}
"""GPT-2's kind and Llama's, which have more parameters than one bucket holds, and experts."""

ELEMENT = 4  # bytes of float32
NUMBER = 8  # bytes of a float64 or int64
BUCKET, ALIGNED = 2**22, 64  # elements


@dataclass(frozen=True)
class Job:
    """One layout whose messages are counted."""

    layout: ParallelLayout
    sequence_parallel: bool = False
    model: str = "tied"
    comm: str = "p2p"
    dispatcher: str = "allgather"

    @property
    def config(self) -> GPTConfig:
        """The model's configuration."""
        return MODELS[self.model]

    @property
    def name(self) -> str:
        """Degrees that are not 1, for example `tp2·sp·pp2`."""
        names = ("tp", "sp", "cp", "pp", "vpp", "dp", "ep")
        sizes = {n: getattr(self.layout, n) for n in names if n != "sp"}
        degrees = {n: f"{n}{size}" for n, size in sizes.items() if size > 1}
        degrees |= {"sp": "sp"} if self.sequence_parallel else {}
        degrees |= {"cp": f"{degrees['cp']}·{self.comm}"} if self.comm != "p2p" else {}
        degrees |= {"a2a": "a2a"} if self.dispatcher == "alltoall" else {}
        return "·".join(degrees[n] for n in (*names, "a2a") if n in degrees)

    @property
    def title(self) -> str:
        """Name and model, for test identifiers."""
        return f"{self.name}-{self.model}"

    @property
    def losses(self) -> int:
        """How many there are: that of the model, and of its routers."""
        return 2 if self.config.num_experts else 1


def _job(
    model: str = "tied", *, sp: bool = False, comm: str = "p2p", a2a: bool = False, **degrees: int
) -> Job:
    layout = ParallelLayout(**{"dp": 1, **degrees})
    return Job(layout, sp, model, comm, "alltoall" if a2a else "allgather")


JOBS = (
    _job(tp=2),
    _job(tp=4),
    _job(tp=2, sp=True),
    _job(tp=4, sp=True),
    _job(pp=2),
    _job(pp=4),
    _job(pp=2, vpp=2),
    _job(dp=2),
    _job(dp=4),
    _job(tp=2, sp=True, pp=2, dp=2),
    _job("untied", tp=2, sp=True, pp=2, dp=2),
    _job(cp=2),
    _job("untied", cp=4),
    _job("untied", cp=4, comm="a2a"),
    _job("untied", cp=4, comm="allgather"),
    _job("untied", tp=2, sp=True, cp=2, dp=2),
    _job(tp=2, cp=2, comm="a2a", pp=2),
    _job("moe", dp=2, ep=2),
    _job("moe", a2a=True, dp=2, ep=2),
    _job("moe", a2a=True, dp=4, ep=2),
    _job("moe", sp=True, a2a=True, tp=2, pp=2, ep=2, etp=1),
)


class Message(NamedTuple):
    """Messages of one purpose in one step of one rank; `nbytes` is over all of them."""

    what: str
    axis: str
    operation: str
    calls: int
    nbytes: int


Totals = dict[tuple[str, str], tuple[int, int]]
"""By axis and operation: number of calls and bytes over all of them."""


# -- formulas --------------------------------------------------------------------------------------


def formula(job: Job, rank: int) -> list[Message]:
    """What `rank` communicates in one step."""
    layout = job.layout
    stages = range(layout.coordinates(rank).pp, layout.pp * layout.vpp, layout.pp)
    ends = [{"first": n == 0, "last": n == layout.pp * layout.vpp - 1} for n in stages]
    found = [message for end in ends for message in activations(job, **end)]
    found += [message for end in ends for message in gradients(job, **end)]
    found += scalars(layout, job.losses)
    return [message for message in found if message.calls]


def activations(job: Job, *, first: bool, last: bool) -> Iterator[Message]:
    """Forward and backward passes of all micro-batches through one stage."""
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
            yield Message(what, "tp", "all_gather", pairs, pairs * part)
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
    for operation, there in borders.items():
        yield Message(what, "pp", operation, m * there, m * there * part)


def attention(job: Job, passes: int, tokens: int) -> Iterator[Message]:
    """Attention of `passes` micro-batches and layers, forward and backward, over context ranks."""
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


def gradients(job: Job, *, first: bool, last: bool) -> Iterator[Message]:
    """The sums of the gradients of one stage, once a step."""
    ranks = (job.layout.dp or 1) * job.layout.cp
    data = ["dp" if job.layout.cp == 1 else "dp_cp"] if ranks > 1 else []
    tensor = ["tp"] if job.layout.tp > 1 else []
    axes = {"whole": data, "partial": [*data, *tensor], "tied": [*data, "embedding"]}
    axes["expert"] = ["expert_dp"] if job.layout.expert_dp > 1 else []
    for kind, sizes in parameters(job, first=first, last=last).items():
        filled = buckets(sizes, job.layout.expert_dp if kind == "expert" else ranks)
        for axis in axes[kind]:
            what = f"{sum(sizes):,} parameters"
            nbytes = ELEMENT * sum(filled)
            yield Message(what, axis, "all_reduce of gradients", len(filled), nbytes)


def parameters(job: Job, *, first: bool, last: bool) -> dict[str, list[int]]:
    """Sizes of the parameters of a stage, in forward order, by what their sum needs."""
    c, t = job.config, job.layout.tp
    h, f, v = c.hidden_size, c.ffn_hidden_size, c.padded_vocab_size
    fused = (c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels
    inner = c.num_attention_heads * c.kv_channels
    up = 2 * f if c.activation == "swiglu" else f
    gpt2 = c.normalization == "LayerNorm"  # with biases and learned positions
    norms = [h] * (2 if gpt2 else 1)
    tied = not c.untie_embeddings_and_output_weights
    stages = job.layout.pp * job.layout.vpp
    sizes: dict[str, list[int]] = {"tied": [], "partial": [], "whole": [], "expert": []}
    local = sizes["partial"] if job.sequence_parallel else sizes["whole"]  # seen in part
    word = sizes["tied"] if tied and stages > 1 else sizes["whole"]
    if first or (last and tied):
        word.append(v * h // t)
    if first and gpt2:
        local.append(c.max_position_embeddings * h)
    pairs = [((fused // t, h), (h, inner // t)), ((up // t, h), (h, f // t))]
    for _ in range(c.num_layers // stages):
        for columns, rows in pairs[:1] if c.num_experts else pairs:
            local.extend(norms)
            sizes["whole"].append(columns[0] * columns[1])
            sizes["whole"].extend([columns[0]] * gpt2)
            sizes["whole"].append(rows[0] * rows[1])
            local.extend([h] * gpt2)
        if c.num_experts:
            local.extend(norms)
            for kind, found in routed_parameters(c, job.layout).items():
                sizes[kind].extend(found)
    if last:
        local.extend(norms)
        sizes["whole"].extend([] if tied else [v * h // t])
    return {kind: found for kind, found in sizes.items() if found}


def buckets(sizes: list[int], ranks: int) -> list[int]:
    """Elements of each bucket: whole parameters, from the last one on, as many as fit."""
    filled: list[int] = []
    for size in reversed(sizes):
        if not filled or filled[-1] + size > BUCKET:
            filled.append(0)
        filled[-1] += up_to(size, ALIGNED)
    return [up_to(elements, ALIGNED * ranks) for elements in filled]


def up_to(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def scalars(layout: ParallelLayout, losses: int = 1) -> Iterator[Message]:
    """Numbers that all ranks must have, once a step, 8 bytes each; a denominator for each loss."""
    samples, world = (layout.dp or 1) * layout.cp, layout.world_size
    stage = layout.tp * samples
    data = "dp" if layout.cp == 1 else "dp_cp"
    if (layout.dp or 1) > 1:
        what = "numbers of true tokens"
        yield Message(what, "dp", "all_reduce of token counts", 1, NUMBER * losses)
    if losses > 1 and world > 1:
        yield Message("losses inside", "world", "all_reduce of inner loss sums", 1, NUMBER)
    for what, axis, operation, ranks in (
        ("loss", data, "all_reduce of loss sums", samples),
        ("gradient norm of a stage", "tp_dp_cp", "all_reduce of gradient norm", stage),
        ("gradient norm", "pp", "all_reduce of gradient norm", layout.pp),
        ("step digest", "pp", "all_gather of step digest", layout.pp),
        ("loss of the last stage", "pp", "broadcast of loss sums", layout.pp),
        ("whether to stop", "world", "all_reduce of wishes to stop", world),
    ):
        yield Message(what, axis, operation, int(ranks != 1), NUMBER * (ranks != 1))


def added(messages: list[Message], times: int = 1) -> Totals:
    """The messages as `Mesh.counting` tells them apart."""
    totals: Totals = {}
    for message in messages:
        calls, nbytes = totals.get(message[1:3], (0, 0))
        totals[message[1:3]] = calls + times * message.calls, nbytes + times * message.nbytes
    return totals


# -- counting --------------------------------------------------------------------------------------


def count(mesh: Mesh, job: Job) -> Totals:
    """What this rank communicates in a run of `STEPS` steps."""
    stages = gpt_chunks(
        job.config,
        mesh,
        sequence_parallel=job.sequence_parallel,
        cp_comm_type=job.comm,
        dispatcher=job.dispatcher,
    )
    engine = StepEngine(GPTTask(stages, None), mesh)
    settings = OptimizerConfig(lr=1e-4, clip_grad=1.0)
    trainer = Trainer(
        engine=engine,
        optimizer=Optimizer(
            engine.parameters, engine.table, mesh, settings, gradients=engine.gradients
        ),
        learning_rate=LearningRateSchedule(max_lr=1e-4, decay_samples=1000),
        weight_decay=WeightDecaySchedule(start=0.1, end=0.1, samples=STEPS),
        steps=lambda consumed: batches(mesh),
        train_iters=STEPS,
    )
    with mesh.counting() as traffic:
        trainer.run()
    return {(r.axis, r.operation): (r.calls, r.nbytes) for r in traffic.records}


def batches(mesh: Mesh) -> Iterator[list[Batch]]:
    """Yield the micro-batches of every step."""
    generator = torch.Generator().manual_seed(mesh.axis("dp").index)
    ones = torch.ones(SAMPLES, LENGTH)
    for _ in range(STEPS):
        texts = [
            torch.randint(1000, (SAMPLES, LENGTH + 1), generator=generator)
            for _ in range(MICRO_BATCHES)
        ]
        yield [{"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": ones} for text in texts]


# -- the table -------------------------------------------------------------------------------------


def table(results: dict[Job, list[Totals]]) -> tuple[str, list[str]]:
    """The table of all layouts, and a line for each message that is not as its formula says."""
    lines = [
        "| layout | model | axis | operation | calls | formula | bytes | formula |",
        "|---|---|---|---|---|---|---|---|",
    ]
    failed = []
    for job, ranks in results.items():
        for rank, counted in enumerate(ranks):
            failed += [
                f"{job.title}, rank {rank}: {line}" for line in differences(job, rank, counted)
            ]
        lines += [f"| {job.name} | {job.model} | {line} |" for line in rows(job, ranks[0])]
    return "\n".join(lines) + "\n", failed


def differences(job: Job, rank: int, counted: Totals) -> list[str]:
    """What a rank has communicated otherwise than by formula."""
    expected = added(formula(job, rank), STEPS)
    return [
        f"{operation} on axis {axis!r}: (calls, bytes) {counted.get((axis, operation), (0, 0))}, "
        f"by formula {expected.get((axis, operation), (0, 0))}"
        for axis, operation in dict.fromkeys([*expected, *counted])
        if counted.get((axis, operation)) != expected.get((axis, operation))
    ]


def rows(job: Job, counted: Totals) -> list[str]:
    """A step of rank 0; messages of one number are taken together."""
    expected = added(formula(job, 0))
    small = set(added(list(scalars(job.layout, job.losses))))
    shown = {key: (key[0], key[1]) for key in dict.fromkeys([*expected, *counted])}
    shown |= {key: ("", "numbers") for key in shown if key in small}
    found: dict[tuple[str, str], list[float]] = {}
    for key, line in shown.items():
        sums = found.setdefault(line, [0, 0, 0, 0])
        for place, value in enumerate(counted.get(key, (0, 0))):
            sums[2 * place] += value / STEPS
        for place, value in enumerate(expected.get(key, (0, 0))):
            sums[2 * place + 1] += value
    return [
        " | ".join(
            [*line, *(f"{number:,g}" if number % 1 else f"{int(number):,}" for number in sums)]
        )
        for line, sums in found.items()
    ]


def main() -> int:
    """Count everything; 0 if every rank of every layout is as the formulas say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    with WorkerPool(max_ranks=8, collective_timeout=60, timeout=300) as pool:
        counted = {job: pool.run_mesh(job.layout, count, job) for job in tqdm(JOBS, disable=None)}
    text, failed = table(counted)
    return publish("traffic", text, failed, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
