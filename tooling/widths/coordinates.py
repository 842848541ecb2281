"""Coordinate check: how activations of models of several widths change in a few steps of training.

    python tooling/widths/coordinates.py [--steps 4] [--lr 0.01] [--widths 64 128 256 512 1024]

Prints the mean absolute change of the outputs of each sublayer, and of the logits, since the start.
With maximal update parametrization it is the same for all widths. With the standard one it grows.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_models import GPT, GPTConfig

from widths.training import Training, batches, model_config

WIDTHS = (64, 128, 256, 512, 1024)
BASE = 64
STEPS, LEARNING_RATE = 4, 0.01
SIZE, LENGTH = 4, 32


def changes(
    config: GPTConfig, steps: int = STEPS, lr: float = LEARNING_RATE, seed: int = 0
) -> dict[str, float]:
    """Returns the mean absolute change of activations in a training, by module."""
    training = Training(config, seed=seed, size=SIZE, length=LENGTH)
    tokens, _ = next(batches(seed + 1, size=SIZE, length=LENGTH))
    before = activations(training.model, tokens)
    for _ in range(steps):
        training.step(lr)
    after = activations(training.model, tokens)
    return {name: float((after[name] - before[name]).abs().mean()) for name in after}


@torch.no_grad()
def activations(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    """Returns the outputs of embedding, sublayers and output layer."""
    found: dict[str, Tensor] = {}
    modules: dict[str, nn.Module] = {"embedding": model.embedding}
    for number, block in model.layers.items():
        for name in ("attention", "mlp"):
            modules[f"layer {number}, {name}"] = getattr(block, name)
    with watched(modules, found):
        logits = model(tokens)
    return {**found, "logits": logits[..., : model.config.vocab_size]}


@contextmanager
def watched(modules: dict[str, nn.Module], found: dict[str, Tensor]) -> Iterator[None]:
    """Returns a context in which the outputs of modules are collected."""

    def keep(name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        found[name] = output

    handles = [m.register_forward_hook(partial(keep, name)) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Returns the power of the width that sizes grow with, by least squares of logarithms."""
    x = torch.tensor([math.log(width) for width in widths], dtype=torch.float64)
    y = torch.tensor([math.log(size) for size in sizes], dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def main() -> None:
    """Prints a table for each parametrization."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    widths = arguments.widths
    for mup, title in ((False, "standard"), (True, "maximal update")):
        found = [
            changes(
                model_config(width, mup=mup, base=BASE, length=LENGTH),
                arguments.steps,
                arguments.lr,
            )
            for width in widths
        ]
        print(f"\n| {title} | {' | '.join(map(str, widths))} | power of the width |")
        print("|---|" + "--:|" * (len(widths) + 1))
        for name in found[0]:
            sizes = [each[name] for each in found]
            row = " | ".join(f"{size:.3f}" for size in sizes)
            print(f"| {name} | {row} | {slope(widths, sizes):.2f} |")


if __name__ == "__main__":
    main()
