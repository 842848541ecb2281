"""Times sizes of tiles for our Triton kernels of attention on a CUDA device.

The kernels take their sizes from the tables of `attention_launch.py`. Each row replaces one entry
by a candidate and measures the passes that use it: causal attention in bfloat16 over 8,192 tokens
and 2,048 channels, with dropout. Milliseconds are medians of CUDA events. The first call of a
candidate compiles it. TFLOP/s count the products of the allowed half, 2.5 times as many backward.

    python tooling/bench/attention_tilings.py [--widths 64 128] [--groups 4] [--repeats 7]
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from megatron_kernels import Mask, attention
from megatron_kernels.inputs import CaseDropout
from megatron_kernels.triton_kernels.attention_launch import (
    FORWARD,
    KEY_GRADIENT,
    QUERY_GRADIENT,
    Tiling,
)

TOKENS, CHANNELS = 8192, 2048
TABLES = {"forward": FORWARD, "queries": QUERY_GRADIENT, "keys": KEY_GRADIENT}
CANDIDATES = {
    ("forward", 64): [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)],
    ("queries", 64): [(128, 64, 8, 3), (128, 64, 4, 2), (64, 64, 4, 2)],
    ("keys", 64): [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2)],
    ("forward", 128): [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 128, 8, 2)],
    ("queries", 128): [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2)],
    ("keys", 128): [(128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)],
}


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Returns the median time of a call on the device."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def passes(width: int, groups: int, dropout: bool) -> tuple[Callable[[], object], ...]:
    """Returns the forward pass and the backward pass of one call."""
    heads = CHANNELS // width
    shapes = [(TOKENS, 1, number, width) for number in (heads, groups, groups)]
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    )
    words = torch.randint(-(2**31), 2**31, (2, TOKENS, 1), device="cuda").int()
    drop = CaseDropout(*words, first_head=0, length=TOKENS) if dropout else None
    forward = partial(attention, q, k, v, Mask(), dropout=drop, backend="triton")
    out = forward()
    dout = torch.randn_like(out)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def main() -> None:
    """Prints a line for each call, and one for each candidate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_tilings: nothing is measured: there is no GPU")
        return
    print(torch.cuda.get_device_name())
    for width in options.widths:
        products = 2.0 * TOKENS**2 * CHANNELS / 1e9
        for groups in (CHANNELS // width, options.groups):
            for dropout in (False, True):
                forward, backward = (
                    milliseconds(each, options.repeats) for each in passes(width, groups, dropout)
                )
                print(
                    f"heads of {width} in {groups} groups, {'' if dropout else 'no '}dropout: "
                    f"forward {forward:.2f} ms, {products / forward:.0f} TFLOP/s; "
                    f"backward {backward:.2f} ms, {2.5 * products / backward:.0f} TFLOP/s"
                )
        runs = passes(width, options.groups, dropout=True)
        for (name, of), candidates in CANDIDATES.items():
            table = TABLES[name]
            entry = table[2, width]
            for candidate in candidates if of == width else ():
                table[2, width] = Tiling(*candidate)
                time = milliseconds(runs[name != "forward"], options.repeats)
                used = " (in use)" if table[2, width] == entry else ""
                print(f"  {name} {candidate}: {time:.2f} ms{used}", flush=True)
            table[2, width] = entry


if __name__ == "__main__":
    main()
