"""Compares counter-based dropout with `torch.nn.functional.dropout`; CPU time, medians."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from megatron_parallel import DropoutKey, keyed_dropout
from torch import Tensor
from torch.nn import functional

SEQUENCE, SAMPLES, HIDDEN = 1024, 4, 1024
Way = Callable[[Tensor], Tensor]


def forward_and_backward(way: Way, x: Tensor) -> Callable[[], object]:
    leaf = x.clone().requires_grad_()
    gradient = torch.ones_like(x)

    def run() -> None:
        leaf.grad = None
        way(leaf).backward(gradient)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    x = torch.randn(SEQUENCE, SAMPLES, HIDDEN)
    key = DropoutKey.for_batch(
        seed=1, iteration=1, samples=torch.arange(SAMPLES), positions=SEQUENCE
    )
    ways: dict[str, Way] = {
        "keyed_dropout": lambda x: keyed_dropout(x, 0.1, key, layer=0, site=0),
        "F.dropout": lambda x: functional.dropout(x, 0.1),
        "x * 2 (the bound)": lambda x: x * 2,
    }
    for name in list(ways)[:2]:
        ways[f"{name}, compiled"] = torch.compile(ways[name], fullgraph=True)
    tasks: dict[tuple[str, int], Callable[[], object]] = {}
    for name, way in ways.items():
        tasks[name, 0] = lambda way=way: way(x)
        tasks[name, 1] = forward_and_backward(way, x)
    times: dict[tuple[str, int], list[float]] = {task: [] for task in tasks}
    for _ in range(repeats + 2):
        for task, run in tasks.items():
            start = time.process_time()
            run()
            times[task].append(time.process_time() - start)
    print(f"{x.numel():,} float32 elements, p = 0.1, one thread\n")
    print("| way | forward, CPU ms | forward and backward, CPU ms |\n|---|---|---|")
    for name in ways:
        one, both = (statistics.median(times[name, which][2:]) * 1e3 for which in (0, 1))
        print(f"| {name} | {one:.1f} | {both:.1f} |")


if __name__ == "__main__":
    main()
