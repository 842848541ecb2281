"""Compares a step with one context-parallel size for all documents and with one for each.

    python -m layouts.pooled [--write docs/parallelism.md]

Global batches have samples of packed documents (`layouts.balance`) that are too long for one rank.
Work is that of Llama 3 8B: of tokens, and of the pairs of query and key that a causal mask inside
documents allows. Ranks that share a sample or a row wait for the busiest of them; groups wait for
each other at the end of the step. A ratio is this time over that of evenly divided work.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

import torch
from megatron_models import GPTConfig, tokens_per_pair
from megatron_parallel.context_parallel import ContextSplit, PoolPlan, attention_pairs, plan_pool
from torch import Tensor

from layouts.balance import LENGTHS, SEED, packed
from layouts.output import publish

LENGTH, ROOM, POOLS, BATCHES = 32768, 8192, (8, 16, 32), 20
CP = LENGTH // ROOM
MODEL = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    activation="swiglu",
    vocab_size=128256,
    max_position_embeddings=LENGTH,
)


def static(samples: list[Tensor], pool: int, split: str) -> float:
    """Returns the ratio if all samples are sharded over `CP` ranks, for `pool / CP` groups."""
    per_pair = tokens_per_pair(MODEL)
    groups = pool // CP
    times = [0.0] * groups
    total = 0.0
    for number, ids in enumerate(samples):
        cut = ContextSplit.zigzag(LENGTH, CP)
        if split == "per_document":
            cut = ContextSplit.per_document(ids, CP)
        work = LENGTH / CP + per_pair * attention_pairs(cut, ids)
        times[number % groups] += float(work.max())
        total += float(work.sum())
    return max(times) * pool / total


def planned(samples: list[Tensor], pool: int) -> PoolPlan:
    """Returns the plan of a pool for the documents of these samples."""
    lengths = [
        n for ids in samples for n in ids[0].unique_consecutive(return_counts=True)[1].tolist()
    ]
    return plan_pool(lengths, pool, ROOM, tokens_per_pair=tokens_per_pair(MODEL))


def table() -> tuple[str, list[str]]:
    """Returns the table, and a line for each result that is not as expected."""
    lines = [
        "| lengths of documents | ranks | `zigzag` | `per_document` | hybrid | worst batch: "
        "`per_document` | hybrid | unsplit documents | keys and values sent: static | hybrid "
        "| padding |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    failed = []
    for name, lengths in LENGTHS.items():
        for pool in POOLS:
            generator = torch.Generator().manual_seed(SEED)
            found: dict[str, list[float]] = {}
            for _ in range(BATCHES if lengths else 1):
                one = torch.zeros(1, LENGTH, dtype=torch.int32)
                samples = [
                    packed(*lengths, generator, LENGTH) if lengths else one for _ in range(2 * pool)
                ]
                for key, value in measured(samples, pool).items():
                    found.setdefault(key, []).append(value)
            means = {key: mean(values) for key, values in found.items()}
            worst = {key: max(values) for key, values in found.items()}
            cells = [f"{means[key]:.2f}" for key in ("zigzag", "per_document", "hybrid")]
            cells += [f"{worst[key]:.2f}" for key in ("per_document", "hybrid")]
            cells += [f"{means['unsplit']:.0%}", f"{CP - 1:.2f}", f"{means['sent']:.2f}"]
            cells.append(f"{means['padding']:.1%}")
            lines.append(f"| {name} | {pool} | {' | '.join(cells)} |")
            if means["hybrid"] > 1.06:
                failed.append(f"{name} on {pool} ranks: a pool has ratio {means['hybrid']:.3f}")
    return "\n".join(lines) + "\n", failed


def measured(samples: list[Tensor], pool: int) -> dict[str, float]:
    """Returns the numbers of one batch."""
    plan = planned(samples, pool)
    documents = [len(row.documents) for row in plan.rows]
    alone = [len(row.documents) for row in plan.rows if len(row.ranks) == 1]
    tokens = sum(row.tokens for row in plan.rows)
    return {
        "zigzag": static(samples, pool, "zigzag"),
        "per_document": static(samples, pool, "per_document"),
        "hybrid": plan.imbalance,
        "unsplit": sum(alone) / sum(documents),
        "sent": plan.sends_per_token,
        "padding": sum(row.padded_length for row in plan.rows) / tokens - 1,
    }


def main() -> int:
    """Prints the table; returns 0 if plans of pools are even."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    text, failed = table()
    return publish("pooled", text, failed, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
