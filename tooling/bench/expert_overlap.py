"""Compares experts' messages with and without another micro-batch to hide them; interleaved.

Two ranks of one thread each, connected by Gloo, hold the experts of a small GPT. A step is forward
and backward of all micro-batches, without an optimizer. Between processes of one machine a message
is a copy that costs processor time, which nothing can hide. So the benchmark simulates a wire: a
message arrives only after a delay, during which no processor works for it. Numbers are medians.
"waiting" is the time of a step in which the slower rank only waited for the wire, and "gain" the
median over rounds of plain / combined.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple
from unittest import mock

import megatron_parallel.expert_parallel.exchange as exchange
import torch
import torch.distributed as dist
from megatron_models import GPTConfig, Placement, gpt_chunks
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from megatron_train import GPTTask, MicroBatch
from megatron_train.engine import StepEngine
from torch import Tensor

LENGTH = 128
SCHEDULES = {"plain": "1f1b", "combined": "combined-1f1b"}


class Times(NamedTuple):
    """Seconds of a step, and of its waits for the wire."""

    wall: float
    waiting: float


def build(mesh: Mesh, layers: int, hidden: int, schedule: str) -> StepEngine:
    config = GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        ffn_hidden_size=4 * hidden,
        vocab_size=1024,
        max_position_embeddings=LENGTH,
        num_experts=8,
        moe_ffn_hidden_size=2 * hidden,
    )
    stages = gpt_chunks(config, Placement(mesh, dispatcher="alltoall"), seed=1)
    return StepEngine(GPTTask(stages, None), mesh, schedule=schedule)


def batches(mesh: Mesh, count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(mesh.rank)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, 1024, (1, LENGTH), generator=generator)
        mask = torch.ones(1, LENGTH)
        fields = {"tokens": tokens, "labels": tokens, "loss_mask": mask}
        found.append(MicroBatch.from_fields(fields, token_field="tokens"))
    return found


@contextmanager
def wire(seconds: float) -> Iterator[list[float]]:
    """Delays messages by `seconds` in the block; yields the times waited for that.

    Excludes the time that the processes themselves need to copy them.
    """
    launch, wait = exchange._launch, exchange._Message.wait
    sent: dict[int, float] = {}
    waits: list[float] = []

    def launched(rows: Tensor, splits: exchange.RowSplits) -> exchange._Message:
        message = launch(rows, splits)
        sent[id(message)] = time.perf_counter()
        return message

    def waited(message: exchange._Message) -> Tensor:
        received = wait(message)
        waits.append(max(0.0, sent.pop(id(message)) + seconds - time.perf_counter()))
        time.sleep(waits[-1])
        return received

    with (
        mock.patch.object(exchange, "_launch", launched),
        mock.patch.object(exchange._Message, "wait", waited),
    ):
        yield waits


def rank_times(
    mesh: Mesh, shape: tuple[int, int], count: int, delays: Sequence[float], repeats: int
) -> dict[tuple[str, float], list[Times]]:
    """Returns seconds of every schedule and delay, taken alternately.

    Both schedules must give equal gradients.
    """
    data = batches(mesh, count)
    engines = {name: build(mesh, *shape, schedule) for name, schedule in SCHEDULES.items()}
    tokens = engines["plain"].denominators(data)
    ways = [(name, delay) for delay in delays for name in engines]
    times: dict[tuple[str, float], list[Times]] = {way: [] for way in ways}
    for number in range(repeats + 1):
        turn = number % len(ways)
        for name, delay in ways[turn:] + ways[:turn]:
            engines[name].zero()
            dist.barrier()
            start = time.perf_counter()
            with wire(delay) as waits:
                engines[name].run(data, tokens, 1)
            if number:
                times[name, delay].append(Times(time.perf_counter() - start, sum(waits)))
    truth = engines["plain"].gradients()
    for name, gradient in engines["combined"].gradients().items():
        assert torch.equal(gradient, truth[name])
    return times


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    yield "| wire ms | plain ms | of these waiting | combined ms | of these waiting | gain |"
    yield "|---|---|---|---|---|---|"
    delays = [0.0, *(delay / 1000 for delay in arguments.delays)]
    shape = (arguments.layers, arguments.hidden)
    with WorkerPool(2, timeout=3600, collective_timeout=600) as pool:
        settings = (shape, arguments.micro_batches, delays, arguments.repeats)
        layout = ParallelLayout(ep=2).resolve(2)
        ranks = pool.run_mesh(layout, rank_times, *settings, timeout=3600)
    for delay in delays:
        cells, ways = [f"{1000 * delay:g}"], []
        for name in SCHEDULES:
            rounds = list(zip(*(times[name, delay] for times in ranks), strict=True))
            ways.append([max(each.wall for each in rank) for rank in rounds])
            waiting = median(max(each.waiting for each in rank) for rank in rounds)
            cells += [f"{1000 * median(ways[-1]):.0f}", f"{1000 * waiting:.0f}"]
        gain = median(plain / combined for plain, combined in zip(*ways, strict=True))
        yield f"| {' | '.join([*cells, f'{gain:.3f}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--delays", type=float, nargs="+", default=[2.0, 5.0, 10.0])
    parser.add_argument("--repeats", type=int, default=9)
    for row in rows(parser.parse_args()):
        print(row, flush=True)


if __name__ == "__main__":
    main()
