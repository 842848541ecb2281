"""Measures how evenly context parallelism divides attention over packed documents.

    python -m layouts.balance [--write docs/parallelism.md]

Samples are packed like those of a dataset: documents of random lengths one after another, cut at
the end of the sample. Work is the number of pairs of query and key that a causal mask inside
documents allows. A ratio is that of the busiest rank, for which all others wait, to the average.
"""

import argparse
import sys
from pathlib import Path

import torch
from megatron_parallel.context_parallel import ContextSplit, attention_pairs, imbalance
from torch import Tensor

from layouts.output import publish

LENGTH, SAMPLES, SEED = 8192, 200, 1
RANKS = (2, 4, 8)
LONGEST = 4 * LENGTH

LENGTHS = {
    "one document": None,
    "log-normal, median 400": (400.0, 1.2),
    "log-normal, median 1,500": (1500.0, 1.2),
    "log-normal, median 6,000": (6000.0, 1.2),
}
"""Median of the lengths of documents, and standard deviation of their logarithm."""


def packed(
    median: float, spread: float, generator: torch.Generator, length: int = LENGTH
) -> Tensor:
    """Returns document ids `[1, s]` of a sample that begins somewhere in a stream of documents."""
    ids = torch.zeros(length, dtype=torch.int32)
    filled = -int(torch.randint(LONGEST, (), generator=generator))
    number = 0
    while filled < length:
        drawn = median * float(torch.randn((), generator=generator).mul(spread).exp())
        filled += max(1, min(LONGEST, round(drawn)))
        number += 1
        ids[max(0, filled) :] = number
    return ids[None]


def ratios(ids: Tensor, ranks: int) -> dict[str, float]:
    """Returns the work of the busiest rank over the average, by split."""
    contiguous = torch.arange(LENGTH).view(ranks, 1, -1)
    splits = {
        "contiguous": ContextSplit(contiguous),
        "zigzag": ContextSplit.zigzag(LENGTH, ranks),
        "per_document": ContextSplit.per_document(ids, ranks),
    }
    return {name: imbalance(attention_pairs(split, ids)) for name, split in splits.items()}


def table() -> tuple[str, list[str]]:
    """Returns the table, and a line for each result that is not as expected."""
    lines = [
        "| lengths of documents | ranks | contiguous | `zigzag` | `per_document` | worst sample: "
        "`zigzag` | `per_document` |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = []
    for name, lengths in LENGTHS.items():
        generator = torch.Generator().manual_seed(SEED)
        one = torch.zeros(1, LENGTH, dtype=torch.int32)
        samples = [packed(*lengths, generator) for _ in range(SAMPLES)] if lengths else [one]
        for ranks in RANKS:
            found = [ratios(ids, ranks) for ids in samples]
            columns = {key: [each[key] for each in found] for key in found[0]}
            means = [sum(values) / len(values) for values in columns.values()]
            worst = [max(columns[key]) for key in ("zigzag", "per_document")]
            cells = " | ".join(f"{number:.2f}" for number in [*means, *worst])
            lines.append(f"| {name} | {ranks} | {cells} |")
            if not worst[1] < 1.01:
                failed.append(f"{name} on {ranks} ranks: per_document has ratio {worst[1]:.3f}")
    return "\n".join(lines) + "\n", failed


def main() -> int:
    """Prints the table; returns 0 if splitting every document by itself is even."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    text, failed = table()
    return publish("balance", text, failed, arguments.write)


if __name__ == "__main__":
    sys.exit(main())
