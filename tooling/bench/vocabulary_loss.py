"""Compares output layer and loss with all logits, with few, and by torch alone; interleaved.

Forward and backward pass of an output matrix and its loss, in fp32 or bf16 on one rank:
`UNFUSED_CROSS_ENTROPY`; `LinearCrossEntropy`, whose gradients come from the backward or from the
forward pass; and torch's `F.linear` and `F.cross_entropy`, which is the peer.
Milliseconds are medians of wall-clock time. Peak bytes are torch's largest allocation in one pass,
beyond the memory allocated before it and the gradients that it returns; the last columns give their
part of the logits of all tokens in float32, and the largest relative difference to torch, of losses
and gradients in fp32.

    OMP_NUM_THREADS=1 python tooling/bench/vocabulary_loss.py [--repeats 7] [--threads 1]
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

VOCAB = 131_072


def passes(
    tokens: int, hidden: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], None]], Callable[[], list[Tensor]]]:
    """Returns a forward and a backward pass for each variant, and what takes its results away."""
    mesh = Mesh.single()
    layer = ColumnParallelLinear(hidden, VOCAB, mesh, bias=False, dtype=dtype)
    initialize_parameters(layer, seed=1, mesh=mesh)
    x = torch.randn(tokens, 1, hidden).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (tokens, 1))
    kept: list[Tensor] = []

    def ours(loss: VocabularyLoss) -> Tensor:
        found: Tensor = layer(x, loss=partial(loss, targets=targets, true_vocab=VOCAB))
        return found.sum()

    def torchs() -> Tensor:
        logits = functional.linear(x, layer.weight).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten(), reduction="sum")

    def run(loss: Callable[[], Tensor]) -> None:
        kept[:] = [loss()]
        kept[0].backward()

    def results() -> list[Tensor]:
        found = [t for t in (kept[0].detach(), x.grad, layer.weight.grad) if t is not None]
        x.grad = layer.weight.grad = None
        return found

    ways = {
        "all logits": partial(ours, UNFUSED_CROSS_ENTROPY),
        "few, backward": partial(ours, LinearCrossEntropy()),
        "few, forward": partial(ours, LinearCrossEntropy(gradients="forward")),
        "torch": torchs,
    }
    return {name: partial(run, loss) for name, loss in ways.items()}, results


def seconds(run: Callable[[], None], clear: Callable[[], list[Tensor]]) -> float:
    """Returns the time of one pass."""
    start = time.perf_counter()
    run()
    taken = time.perf_counter() - start
    clear()
    return taken


def difference(found: list[Tensor], truth: list[Tensor]) -> float:
    """Returns the largest difference of a tensor relative to its largest element."""
    pairs = zip(found, truth, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a pass")
    parser.add_argument("--hidden", type=int, default=256, help="width of the input")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    print("| tokens x hidden | way | ms | of torch | peak MiB | of the logits | difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    tokens, hidden = arguments.tokens, arguments.hidden
    ways, results = passes(tokens, hidden, dtype)
    returned = (tokens + VOCAB) * hidden * dtype.itemsize
    peaks, found = {}, {}
    for name, run in ways.items():
        peaks[name] = peak_bytes(run) - returned
        found[name] = results()
    errors = {name: difference(values, found["torch"]) for name, values in found.items()}
    found.clear()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, run in ways.items():
            taken[name].append(seconds(run, results))
    for name in ways:
        ratio = median(a / b for a, b in zip(taken[name], taken["torch"], strict=True))
        share = peaks[name] / (tokens * VOCAB * 4)
        print(
            f"| {tokens} x {hidden} | {name} | {1e3 * median(taken[name]):.0f} | {ratio:.2f} "
            f"| {peaks[name] / 2**20:.0f} | {share:.3f} | {errors[name]:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
