"""Compares data parallelism on two ranks with torch's DDP; interleaved, medians.

Every rank is a process with one thread; Gloo connects them. A step zeroes gradients, runs forward
and backward passes of all micro-batches, and waits until the gradients are summed; there is no
optimizer. The bound is the same step on both ranks at once without any sum. Efficiency is bound /
time. The last column is the time of the faster DDP over that of the row, in the same round: 1 and
more is at least as fast as torch.

The second table shows the cost of the buffers if nothing is summed: one rank, plain loop.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron_parallel import Mesh, ParallelLayout, Sharding
from megatron_parallel.data_parallel import BUCKET_SIZE, DataParallelConfig, GradientBuffers
from megatron_parallel.testing import WorkerPool
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH = 4096, 128


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.Sequential(*(Layer(hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.layers(self.embedding(tokens)))
        logits = functional.linear(x, self.embedding.weight).flatten(0, 1)
        return functional.cross_entropy(logits, tokens.flatten(), reduction="sum")


Step = Callable[[], None]


def batches(micro_batches: int, sequences: int) -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (sequences, LENGTH)) for _ in range(micro_batches)]


def plain(model: nn.Module, data: list[Tensor], tokens: int) -> Step:
    def step() -> None:
        model.zero_grad()
        for batch in data:
            (model(batch) / tokens).backward()

    return step


def ddp(model: nn.Module, data: list[Tensor], tokens: int, bucket_view: bool) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    each = tokens // dist.get_world_size()  # DDP averages over the ranks

    def step() -> None:
        wrapped.zero_grad()
        for number, batch in enumerate(data):
            with nullcontext() if number + 1 == len(data) else wrapped.no_sync():
                (wrapped(batch) / each).backward()

    return step


def buffered(
    model: nn.Module, data: list[Tensor], tokens: int, mesh: Mesh, bucket_size: int
) -> Step:
    table = {name: Sharding(tuple(p.shape)) for name, p in model.named_parameters()}
    buffers = GradientBuffers(
        model.named_parameters(),
        table,
        mesh,
        config=DataParallelConfig(ddp_bucket_size=bucket_size),
    )

    def step() -> None:
        buffers.zero()
        for number, batch in enumerate(data):
            buffers.begin(last=number + 1 == len(data))
            (model(batch) / tokens).backward()
        buffers.finish()

    return step


class Times(NamedTuple):
    wall: float
    cpu: float


def interleaved(steps: dict[str, Step], repeats: int) -> dict[str, list[Times]]:
    """Returns seconds of each step, taken alternately; every round starts with another step."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(repeats + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            start = Times(time.perf_counter(), time.process_time())
            steps[name]()
            end = Times(time.perf_counter(), time.process_time())
            if number >= 2:  # DDP rebuilds its buckets after its first step
                times[name].append(Times(end.wall - start.wall, end.cpu - start.cpu))
    return times


def rank_times(
    mesh: Mesh,
    shape: tuple[int, int],
    micro_batches: int,
    sequences: int,
    sizes: list[int],
    repeats: int,
) -> dict[str, list[Times]]:
    """Returns the times of all variants on this rank; checks that their gradients are equal."""

    def model() -> GPT:
        torch.manual_seed(1)
        return GPT(*shape)

    data = batches(micro_batches, sequences)
    tokens = micro_batches * sequences * LENGTH * mesh.world_size
    models = {name: model() for name in ("no sum", "DDP", "DDP, bucket view")}
    steps = {
        "no sum": plain(models["no sum"], data, tokens),
        "DDP": ddp(models["DDP"], data, tokens, bucket_view=False),
        "DDP, bucket view": ddp(models["DDP, bucket view"], data, tokens, bucket_view=True),
    }
    for size in sizes:
        name = f"DataParallelConfig, GradientBuffers, {size / 2**20:g} Mi"
        models[name] = model()
        steps[name] = buffered(models[name], data, tokens, mesh, size)
    times = interleaved(steps, repeats)
    truth = dict(models["DDP"].named_parameters())
    for name in list(models)[2:]:
        for key, parameter in models[name].named_parameters():
            torch.testing.assert_close(parameter.grad, truth[key].grad, rtol=1e-4, atol=1e-6)
    return times


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    yield (
        "| micro-batches x tokens | way | wall ms | efficiency | DDP / way | CPU ms "
        "| CPU efficiency | DDP / way |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    sizes = [int(size * 2**20) for size in arguments.bucket_sizes]
    with WorkerPool(2, timeout=3600, collective_timeout=600) as pool:
        for micro_batches, sequences in ((1, 1), (1, 4), (4, 1)):
            ranks = pool.run_mesh(
                ParallelLayout(dp=2),
                rank_times,
                (arguments.layers, arguments.hidden),
                micro_batches,
                sequences,
                sizes,
                arguments.repeats,
            )
            # A step ends when the slower rank ends; CPU seconds are those of both ranks.
            both = {
                name: [
                    Times(max(a.wall, b.wall), a.cpu + b.cpu)
                    for a, b in zip(ranks[0][name], ranks[1][name], strict=True)
                ]
                for name in ranks[0]
            }
            for name in both:
                cells = [f"{micro_batches} x {sequences * LENGTH}", name]
                for clock in Times._fields:
                    seconds = {way: [getattr(t, clock) for t in both[way]] for way in both}
                    peer = min(("DDP", "DDP, bucket view"), key=lambda n: median(seconds[n]))
                    own = seconds[name]
                    cells.append(f"{median(own) * 1e3:.0f}")
                    cells.append(f"{paired(seconds['no sum'], own):.1%}")
                    cells.append(f"{paired(seconds[peer], own):.3f}")
                yield f"| {' | '.join(cells)} |"


def paired(a: list[float], b: list[float]) -> float:
    """Returns the median of the ratios of rounds."""
    return median(x / y for x, y in zip(a, b, strict=True))


def overhead(arguments: argparse.Namespace) -> Iterator[str]:
    yield "| parameters | tokens | plain, CPU ms | GradientBuffers, CPU ms | ratio |"
    yield "|---|---|---|---|---|"
    torch.set_num_threads(1)
    for sequences in (1, 4):
        torch.manual_seed(1)
        model = GPT(arguments.layers, arguments.hidden)
        data = batches(1, sequences)
        steps = {
            "plain": plain(model, data, sequences * LENGTH),
            "ours": buffered(model, data, sequences * LENGTH, Mesh.single(), BUCKET_SIZE),
        }
        times = interleaved(steps, 2 * arguments.repeats)
        pairs = list(zip(times["plain"], times["ours"], strict=True))
        medians = [median(t.cpu for t in times[name]) * 1e3 for name in steps]
        count = sum(p.numel() for p in model.parameters())
        yield (
            f"| {count:,} | {sequences * LENGTH} | {medians[0]:.1f} | {medians[1]:.1f} "
            f"| {median(b.cpu / a.cpu for a, b in pairs):.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--bucket-sizes",
        type=float,
        nargs="+",
        default=[BUCKET_SIZE / 2**20],
        help="in 2^20 elements",
    )
    arguments = parser.parse_args()
    for table in (rows, overhead):
        for row in table(arguments):
            print(row, flush=True)
        print()


if __name__ == "__main__":
    main()
