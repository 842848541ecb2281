"""Compares gradient accumulation inside matrix products with autograd's; interleaved.

A step is forward and backward pass of all micro-batches of a GPT in fp32, with gradient buffers, on
one rank and on two that sum their gradients (Gloo, one thread each); no optimizer. The same model
runs with `fuse_gradient_accumulation` and without. Seconds are medians of a step's, divided by its
micro-batches; wall is the slower rank's, CPU that of all. Ratios are medians of the rounds' ratios,
with their middle half. Peak bytes are torch's largest allocation in one later step, beyond the
memory allocated before it.

    OMP_NUM_THREADS=1 python tooling/bench/gradient_fusion.py [--repeats 15]
"""

import argparse
from collections.abc import Iterator
from itertools import accumulate
from statistics import median, quantiles

import torch
from data_parallel import Step, Times, interleaved
from megatron_models import GPT, GPTConfig
from megatron_parallel import GradientBuffers, Mesh, ParallelLayout, collect_shardings
from megatron_parallel.data_parallel import fuse_gradient_accumulation
from megatron_parallel.testing import WorkerPool
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

WAYS = ("fused", "not fused")


def step_of(config: GPTConfig, mesh: Mesh, data: list[Tensor], fused: bool) -> Step:
    """Returns a step that computes gradients of all micro-batches, summed over the ranks."""
    model = GPT(config, mesh)
    buffers = GradientBuffers(model.named_parameters(), collect_shardings(model), mesh)
    if fused:
        fuse_gradient_accumulation([model], [buffers])
    tokens = sum(batch.numel() for batch in data)

    def step() -> None:
        buffers.zero()
        for number, batch in enumerate(data):
            buffers.begin(last=number + 1 == len(data))
            (model.loss(batch[:, :-1], batch[:, 1:]).sum() / tokens).backward()
        buffers.finish()

    return step


def peak_bytes(step: Step) -> int:
    """Returns torch's largest allocation during a step, beyond the memory allocated before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    found = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))


def measure(
    mesh: Mesh, config: GPTConfig, micro_batches: int, sequences: int, repeats: int
) -> tuple[dict[str, list[Times]], dict[str, int]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shape = sequences, config.max_position_embeddings + 1
    data = [
        torch.randint(config.vocab_size, shape, generator=generator) for _ in range(micro_batches)
    ]
    steps = {way: step_of(config, mesh, data, way == "fused") for way in WAYS}
    return interleaved(steps, repeats), {way: peak_bytes(step) for way, step in steps.items()}


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    config = GPTConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        vocab_size=4096,
        max_position_embeddings=128,
    )
    yield (
        "| ranks | micro-batches x tokens | clock | fused, ms each | not fused, ms each "
        "| fused / not | fused, peak MiB | not fused, peak MiB |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    with WorkerPool(2, timeout=3600, collective_timeout=600) as pool:
        for ranks in (1, 2):
            for micro_batches, sequences in ((4, 1), (4, 4), (1, 1)):
                found = pool.run_mesh(
                    ParallelLayout(dp=ranks),
                    measure,
                    config,
                    micro_batches,
                    sequences,
                    arguments.repeats,
                )
                # A step ends when the slower rank ends; CPU seconds are those of all ranks.
                times = {
                    way: [
                        Times(max(t.wall for t in both), sum(t.cpu for t in both))
                        for both in zip(*(times[way] for times, _ in found), strict=True)
                    ]
                    for way in WAYS
                }
                peaks = [f"{found[0][1][way] / 2**20:.0f}" for way in WAYS]
                size = f"{micro_batches} x {sequences * config.max_position_embeddings}"
                for clock in Times._fields:
                    taken = [[getattr(t, clock) for t in times[way]] for way in WAYS]
                    each = [f"{median(way) / micro_batches * 1e3:.1f}" for way in taken]
                    ratios = [a / b for a, b in zip(*taken, strict=True)]
                    low, middle, high = quantiles(ratios, n=4)
                    ratio = f"{middle:.3f} ({low:.3f} to {high:.3f})"
                    yield f"| {' | '.join([str(ranks), size, clock, *each, ratio, *peaks])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    for row in rows(parser.parse_args()):
        print(row, flush=True)


if __name__ == "__main__":
    main()
