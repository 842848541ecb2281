"""Compares one rank's share of ring attention with SDPA on the same blocks; interleaved.

Forward and backward pass of rank 0 of a ring of two, with messages that arrive at once: the
triangle of its own tokens, and the block of the other rank's keys. "SDPA" is torch's function on
the same queries and keys, without combining the two outputs. Milliseconds are medians.

    python tooling/bench/ring_step.py [--repeats 9] [--threads 1 2]
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from megatron_kernels import PLAIN_SCORES, Mask
from megatron_models.components.attention.context_parallel import ContextParallel
from megatron_models.components.attention.span import EVERYTHING
from megatron_parallel.context_parallel import ContextSplit, ring
from megatron_parallel.mesh.axes import Axis
from torch import Tensor
from torch.nn import functional

LOCAL, WIDTH = 2048, 64
SHAPES = {"8 heads": (8, 8), "8 heads in 2 groups": (8, 2)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Arrived:
    """A message of a ring whose ranks hold the same tensors."""

    def __init__(self, sent: Tensor, axis: Axis, what: str, *, homeward: bool = False) -> None:
        self.sent = sent

    def wait(self) -> Tensor:
        """Returns the received tensor."""
        return self.sent.clone()


def ours(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Runs a step of rank 0 of two."""
    axis = Axis("cp", (0, 1), 0, None, 2)
    split = ContextSplit.zigzag(2 * LOCAL, 2)
    over_ranks = ContextParallel(None, axis, ("p2p",), split, Mask(), None)  # type: ignore[arg-type]
    with patch.object(ring, "_Message", Arrived):
        out = over_ranks.attention(q, k, v, "p2p", 0, 0, PLAIN_SCORES, EVERYTHING)
        out.backward(torch.ones_like(out))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Runs the same two blocks by hand: rank 0 attends to the first half of rank 1's keys."""
    half = LOCAL // 2
    # Rank 0 holds slices 0 and 3 of the sequence, rank 1 slices 1 and 2.
    for queries, keys, values, causal in ((q, k, v, True), (q[half:], k, v, False)):
        heads = (x.permute(1, 2, 0, 3) for x in (queries, keys, values))
        grouped = q.shape[2] != k.shape[2]
        out = functional.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=grouped)
        out.backward(torch.ones_like(out))


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {"SDPA": sdpa, "ring": ours}


def timed(way: Callable[[Tensor, Tensor, Tensor], None], given: list[Tensor]) -> float:
    """Returns milliseconds of a forward and backward pass."""
    for each in given:
        each.grad = None
    start = time.perf_counter()
    way(*given)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print(
        "| threads | dtype | shape | SDPA ms | ring ms | ring / SDPA |\n|---|---|---|---|---|---|"
    )
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            for shape, heads in SHAPES.items():
                given = [
                    torch.randn(LOCAL, 1, n, WIDTH, dtype=dtype, requires_grad=True)
                    for n in (heads[0], heads[1], heads[1])
                ]
                rounds = [
                    {label: timed(way, given) for label, way in WAYS.items()}
                    for _ in range(options.repeats + 1)
                ][1:]
                base, own = (median(each[label] for each in rounds) for label in WAYS)
                ratio = median(each["ring"] / each["SDPA"] for each in rounds)
                print(f"| {threads} | {name} | {shape} | {base:.0f} | {own:.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
