"""Compares output layer and loss with all logits, with few, and by torch alone; interleaved.

Forward and backward pass of an output matrix and its loss, in fp32 on one rank:
`UNFUSED_CROSS_ENTROPY`, `LinearCrossEntropy` of 1,024 tokens, and torch's `F.linear` and
`F.cross_entropy`, which is the peer.
Milliseconds are medians of CPU time; peak bytes are torch's largest allocation in one pass, beyond
the memory allocated before it.

    OMP_NUM_THREADS=1 python tooling/bench/vocabulary_loss.py [--repeats 5]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from gradient_fusion import peak_bytes
from megatron_parallel import ColumnParallelLinear, Mesh, initialize_parameters
from megatron_parallel.tensor_parallel import (
    UNFUSED_CROSS_ENTROPY,
    LinearCrossEntropy,
    VocabularyLoss,
)
from torch import Tensor
from torch.nn import functional

HIDDEN, VOCAB = 256, 32_768
TOKENS = (1024, 4096, 8192)


def passes(tokens: int) -> dict[str, Callable[[], None]]:
    """Returns a forward and a backward pass for each variant."""
    mesh = Mesh.single()
    layer = ColumnParallelLinear(HIDDEN, VOCAB, mesh, bias=False)
    initialize_parameters(layer, seed=1, mesh=mesh)
    x = torch.randn(tokens, 1, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCAB, (tokens, 1))

    def ours(loss: VocabularyLoss) -> Tensor:
        found: Tensor = layer(x, loss=partial(loss, targets=targets, true_vocab=VOCAB))
        return found.sum()

    def torchs() -> Tensor:
        logits = functional.linear(x, layer.weight).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")

    def run(loss: Callable[[], Tensor]) -> None:
        x.grad = layer.weight.grad = None
        loss().backward()

    ways = {
        "all logits": partial(ours, UNFUSED_CROSS_ENTROPY),
        "few": partial(ours, LinearCrossEntropy()),
    }
    ways["torch"] = torchs
    return {name: partial(run, loss) for name, loss in ways.items()}


def seconds(run: Callable[[], None]) -> float:
    """Returns the CPU time of one pass."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| tokens | way | ms | peak MiB |\n|---|---|---|---|")
    for tokens in TOKENS:
        ways = passes(tokens)
        peaks = {name: peak_bytes(run) / 2**20 for name, run in ways.items()}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, run in ways.items():
                taken[name].append(seconds(run))
        for name in ways:
            print(f"| {tokens} | {name} | {1e3 * median(taken[name]):.0f} | {peaks[name]:.0f} |")


if __name__ == "__main__":
    main()
