"""Compares training steps of a GPT with and without attention dropout; interleaved.

A step is the loss, its backward pass, clipping and AdamW of a GPT with 6 layers of 384 channels and
6 heads, a vocabulary of 8,192 and 4 sequences of 256 tokens (14 M parameters), without hidden
dropout. "Reference" writes all probabilities, as this package did before it had tiles. Milliseconds
are medians. On a machine that other processes use too, `--clock main-thread` counts the CPU time of
the main thread, which with passive waiting is its own work and not its waiting for other threads:

    python tooling/bench/attention_dropout.py [--repeats 9] [--threads 1 2]
    OMP_WAIT_POLICY=passive python tooling/bench/attention_dropout.py --clock main-thread
"""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from unittest.mock import patch

import torch
from megatron_kernels.ops.attention import tiles
from megatron_models import GPT, GPTConfig
from megatron_models.components.dropout import Dropout
from megatron_models.placement import Placement
from megatron_optim import Optimizer, OptimizerConfig
from megatron_parallel import DropoutKey, Mesh, TrainableParameters, collect_shardings

LENGTH, BATCH, VOCABULARY = 256, 4, 8192
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONFIG = GPTConfig(
    num_layers=6,
    hidden_size=384,
    num_attention_heads=6,
    vocab_size=VOCABULARY,
    max_position_embeddings=LENGTH,
)


def materialized() -> AbstractContextManager[object]:
    """Returns a context in which attention with dropout writes all probabilities."""
    return patch.object(tiles, "TiledDropout", type("Nothing", (), {}))


CLOCKS = {"wall": time.perf_counter, "main-thread": time.thread_time}


def step_of(dtype: torch.dtype) -> Callable[[float], None]:
    """Returns a training step that takes the probability of attention dropout."""
    mesh = Mesh.single()
    torch.manual_seed(1)
    model = GPT(CONFIG, Placement(mesh, dtype=dtype))
    settings = OptimizerConfig(lr=1e-4, clip_grad=1.0)
    trained = TrainableParameters(model.named_parameters(), collect_shardings(model), mesh)
    optimizer = Optimizer(trained, settings)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    samples = torch.arange(BATCH)
    key = DropoutKey.for_batch(seed=1, iteration=1, samples=samples, positions=LENGTH)

    def step(probability: float) -> None:
        dropout = Dropout(key, attention=probability) if probability else None
        model.loss(tokens, tokens, dropout=dropout).mean().backward()
        optimizer.step(1e-4)
        optimizer.zero_grad()

    return step


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    print("| threads | dtype | none, ms | tiles, ms | reference, ms | tiles / none |")
    print("|---|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            step, rounds = step_of(dtype), []
            for _ in range(options.repeats + 1):
                times = []
                for probability, setting in (
                    (0.0, nullcontext),
                    (0.1, nullcontext),
                    (0.1, materialized),
                ):
                    with setting():
                        start = clock()
                        step(probability)
                        times.append((clock() - start) * 1e3)
                rounds.append(times)
            none, own, reference = (median(each[i] for each in rounds[1:]) for i in range(3))
            ratio = median(each[1] / each[0] for each in rounds[1:])
            print(
                f"| {threads} | {name} | {none:.0f} | {own:.0f} | {reference:.0f} | {ratio:.3f} |"
            )


if __name__ == "__main__":
    main()
