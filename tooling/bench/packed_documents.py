"""Compares attention over packed documents with SDPA on each document by itself; interleaved.

Forward and backward pass of causal attention over 2,048 tokens with 8 heads of 64 channels. "One by
one" calls torch's function for every document and runs its backward pass, "mask" gives it a mask of
all pairs of tokens. Milliseconds are medians.

    python tooling/bench/packed_documents.py [--repeats 9] [--threads 1 2]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from statistics import median

import torch
from megatron_kernels import Mask, attention
from torch import Tensor
from torch.nn import functional

TOKENS, HEADS, WIDTH = 2048, 8, 64
LENGTHS = {
    "8 of 256": [256] * 8,
    "7 of 61 to 700": [700, 61, 400, 129, 300, 210, 248],
    "32 of 64": [64] * 32,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Way = Callable[[Tensor, Tensor, Tensor], None]


def one_by_one(lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Runs SDPA on every document."""
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        heads = (x[end - length : end].permute(1, 2, 0, 3) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads, is_causal=True)
        out.backward(torch.ones_like(out))


def whole(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Runs attention over the whole sequence."""
    out = attention(q, k, v, mask)
    out.backward(torch.ones_like(out))


def timed(way: Way, given: list[Tensor]) -> float:
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
    names = ("threads", "dtype", "documents", "one by one, ms", "ours, ms", "ours / one by one")
    print("| " + " | ".join((*names, "mask, ms")) + " |\n" + "|---" * 7 + "|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, dtype in DTYPES.items():
            for label, lengths in LENGTHS.items():
                of_each = [torch.full((n,), i) for i, n in enumerate(lengths)]
                ids = torch.cat(of_each).int()[None]
                tensor = Mask(dense=Mask(ids).allowed(TOKENS, TOKENS))
                prepared = Mask(ids).prepare(TOKENS, TOKENS)
                ways = (
                    partial(one_by_one, lengths),
                    partial(whole, prepared),
                    partial(whole, tensor),
                )
                given = [
                    torch.randn(TOKENS, 1, HEADS, WIDTH, dtype=dtype, requires_grad=True)
                    for _ in range(3)
                ]
                rounds = [[timed(way, given) for way in ways] for _ in range(options.repeats + 1)]
                base, own, masked = (median(each[i] for each in rounds[1:]) for i in range(3))
                ratio = median(each[1] / each[0] for each in rounds[1:])
                print(
                    f"| {threads} | {name} | {label} | {base:.0f} | {own:.0f} | {ratio:.3f} "
                    f"| {masked:.0f} |"
                )


if __name__ == "__main__":
    main()
