"""Micro-batches on 4 ranks of one model replica: read by one rank and sent, or read by each.

Both variants give equal tensors and alternate on the same ranks. A time is that of the slowest
rank, and the table has medians of rounds. After the first round the corpus is in the page cache of
this machine, the best case for ranks that read by themselves. Four ranks on four machines would
each read it.

    OMP_NUM_THREADS=1 python tooling/bench/batches.py [--rounds 15]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from megatron_data import IndexedDatasetBuilder
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from megatron_train import DataConfig, EvaluationConfig, RunConfig, TrainingConfig
from megatron_train.batches import RunBatches
from megatron_train.broadcast_batches import Batches, open_batches
from megatron_train.tasks.gpt_kind import TASK

LENGTH, SAMPLES, ACCUMULATION = 2048, 4, 8
LAYOUTS = (ParallelLayout(tp=4, dp=1), ParallelLayout(tp=2, pp=2, dp=1), ParallelLayout(pp=4, dp=1))


def write_corpus(prefix: str, documents: int) -> None:
    """Writes documents of 1,000 random tokens each."""
    numbers = np.random.default_rng(1)
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        for _ in range(documents):
            builder.add_item(numbers.integers(0, 50_000, 1000).tolist())
            builder.end_document()
        builder.finalize()


def seconds(mesh: Mesh, prefix: str, rounds: int) -> dict[str, list[float]]:
    """Returns the times of all steps by variant."""
    config = RunConfig(
        model=GPTConfig(
            num_layers=4,
            hidden_size=8,
            num_attention_heads=4,
            vocab_size=50_000,
            max_position_embeddings=LENGTH,
        ),
        data=DataConfig(
            seq_length=LENGTH, data_path=(prefix,), split="1,0,0", broadcast_batches=True
        ),
        training=TrainingConfig(
            train_iters=rounds, micro_batch_size=SAMPLES, global_batch_size=SAMPLES * ACCUMULATION
        ),
        optimizer=OptimizerConfig(lr=1e-4),
        evaluation=EvaluationConfig(eval_iters=0),
        layout=mesh.layout,
    )
    ways: dict[str, Callable[[], Batches]] = {
        "each": lambda: RunBatches(config, TASK.open_data(config, None), mesh.axis("dp")),
        "sent": lambda: open_batches(config, lambda: TASK.open_data(config, None), mesh),
    }
    steps = {way: read().training(0) for way, read in ways.items()}
    taken = {way: list[float]() for way in ways}
    for _ in range(rounds):
        for way, step in steps.items():
            start = time.perf_counter()
            next(step)
            taken[way].append(time.perf_counter() - start)
    return taken


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--documents", type=int, default=20_000, help="of 1,000 tokens")
    args = parser.parse_args()
    print(f"a step is {ACCUMULATION} micro-batches of {SAMPLES} x {LENGTH} tokens")
    print("| layout | each rank reads, ms | one reads and sends, ms |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, WorkerPool(max_ranks=4) as pool:
        prefix = str(Path(folder) / "text")
        write_corpus(prefix, args.documents)
        for layout in LAYOUTS:
            ranks = pool.run_mesh(layout, seconds, prefix, args.rounds, timeout=300)
            cells = []
            for way in ("each", "sent"):
                slowest = [max(times) for times in zip(*(r[way] for r in ranks), strict=True)]
                cells.append(f"{statistics.median(slowest[1:]) * 1e3:.1f}")
            print(f"| {layout} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
