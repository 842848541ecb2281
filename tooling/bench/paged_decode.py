"""Compares attention of new tokens over blocks with attention over a dense cache; interleaved.

Each of 16 sequences has one new token, 8 heads in 2 groups and 64 channels a head. The dense cache
is `[tokens, slots, groups, channels]`: if lengths differ, a mask hides the rest of a slot, and if
some slots are not decoded, the others are copied. Blocks are read in place, by `paged_attention`.
"Scattered" are blocks in random order, which are gathered. Milliseconds of CPU time are medians,
ratios are medians of the rounds' ratios.

    python tooling/bench/paged_decode.py [--repeats 15] [--threads 1]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from megatron_kernels import Mask, Pages, attention, paged_attention
from torch import Tensor

SLOTS, LONGEST, BLOCK, HEADS, GROUPS, CHANNELS = 16, 1024, 16, 8, 2, 64
BLOCKS = LONGEST // BLOCK
CASES = {
    "16 sequences of 512": [512] * SLOTS,
    "16 sequences of 128 to 1,024": [128 + 896 * row // 15 for row in range(SLOTS)],
    "8 of 16 slots, 512 each": [512, 0] * (SLOTS // 2),
    "1 of 16 slots, 512": [512] + [0] * (SLOTS - 1),
}


def dense(q: Tensor, k: Tensor, v: Tensor, rows: list[int], lengths: list[int]) -> Tensor:
    """Returns attention over a dense cache, as a cache without blocks computes it."""
    end = max(lengths)
    if len(rows) < SLOTS:
        k, v = k[:end, rows], v[:end, rows]
    k, v = k[:end], v[:end]
    if len(set(lengths)) == 1:
        return attention(q, k, v, Mask(), query_offset=end - 1)
    positions = torch.arange(end).expand(len(rows), -1)
    own = torch.tensor(lengths)[:, None] - 1
    mask = Mask(positions=positions.int(), query_positions=own.int())
    return attention(q, k, v, mask.prepare(1, end, end - 1), query_offset=end - 1)


def blocks(q: Tensor, k: Tensor, v: Tensor, rows: list[int], lengths: list[int]) -> Tensor:
    """Returns attention over blocks that follow each other."""
    pages = Pages.consecutive([row * BLOCKS for row in rows], lengths, BLOCK)
    return paged_attention(q, k, v, pages)


def scattered(
    q: Tensor, k: Tensor, v: Tensor, rows: list[int], lengths: list[int], order: Tensor
) -> Tensor:
    """Returns attention over blocks in another order."""
    tables = order[rows, : -(-max(lengths) // BLOCK)]
    return paged_attention(q, k, v, Pages(tables, torch.tensor(lengths, dtype=torch.int32)))


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    columns = "dtype", "sequences", "dense, CPU ms", "blocks, CPU ms", "blocks / dense"
    print("|", " | ".join((*columns, "scattered, CPU ms")), "|")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        k, v = (torch.randn(SLOTS, LONGEST, GROUPS, CHANNELS).to(dtype) for _ in range(2))
        by_token = [x.transpose(0, 1).contiguous() for x in (k, v)]
        in_order = [x.view(-1, BLOCK, GROUPS, CHANNELS) for x in (k, v)]
        order = torch.randperm(SLOTS * BLOCKS)
        elsewhere = [torch.empty_like(x).index_copy_(0, order, x) for x in in_order]
        tables = order.view(SLOTS, BLOCKS).int()
        for name, lengths in CASES.items():
            rows = [row for row in range(SLOTS) if lengths[row]]
            q = torch.randn(1, len(rows), HEADS, CHANNELS).to(dtype)
            given = {"rows": rows, "lengths": [lengths[row] for row in rows]}
            calls: list[Callable[[], Tensor]] = [
                partial(dense, q, *by_token, **given),
                partial(blocks, q, *in_order, **given),
                partial(scattered, q, *elsewhere, **given, order=tables),
            ]
            first, *others = (call() for call in calls)
            for found in others:
                torch.testing.assert_close(found, first, rtol=2e-2, atol=2e-2)
            taken: list[list[float]] = [[] for _ in calls]
            for _ in range(arguments.repeats):
                for call, seconds in zip(calls, taken, strict=True):
                    start = time.process_time()
                    call()
                    seconds.append(time.process_time() - start)
            ratio = median(a / b for a, b in zip(taken[1], taken[0], strict=True))
            before, after, copied = (1e3 * median(seconds) for seconds in taken)
            kind = str(dtype).removeprefix("torch.")
            print(f"| {kind} | {name} | {before:.2f} | {after:.2f} | {ratio:.2f} | {copied:.2f} |")


if __name__ == "__main__":
    main()
