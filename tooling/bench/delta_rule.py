"""Compares the gated delta rule in chunks, step by step, and in transformers; CPU time, medians."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from megatron_kernels import gated_delta_rule
from torch import Tensor

# A layer of Qwen3-Next has 16 key heads and 32 value heads of 128 channels.
LENGTH, SAMPLES, KEY_HEADS, VALUE_HEADS, WIDTH = 1024, 1, 4, 8, 128
Way = Callable[..., Tensor]


def ours(backend: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Runs one of our backends."""
    return gated_delta_rule(q, k, v, decay, beta, l2_norm=True, backend=backend).output


def theirs(name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Runs one of transformers' functions for Qwen3-Next."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    run = getattr(modeling_qwen3_next, f"torch_{name}_gated_delta_rule")
    q, k, v, decay, beta = (x.transpose(0, 1) for x in (q, k, v, decay, beta))
    out: Tensor = run(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    return out.transpose(0, 1)


def seconds(way: Way, inputs: list[Tensor], *, backward: bool) -> float:
    """Returns the CPU seconds of one pass, with or without the backward pass."""
    start = time.process_time()
    with torch.set_grad_enabled(backward):
        y = way(*inputs)
        if backward:
            torch.autograd.grad(y.sum(), inputs)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    shape = (LENGTH, SAMPLES)
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(*shape, KEY_HEADS, WIDTH, generator=draw) for _ in range(2))
    v = torch.randn(*shape, VALUE_HEADS, WIDTH, generator=draw)
    decay = -torch.rand(*shape, VALUE_HEADS, generator=draw)
    beta = torch.rand(*shape, VALUE_HEADS, generator=draw)
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    ways: dict[str, Way] = {
        "chunks": partial(ours, "torch"),
        "step by step": partial(ours, "reference"),
        "transformers, chunks": partial(theirs, "chunk"),
        "transformers, step by step": partial(theirs, "recurrent"),
    }
    times: dict[tuple[str, bool], list[float]] = {}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            for backward in (False, True):
                found = seconds(way, inputs, backward=backward)
                if turn:
                    times.setdefault((name, backward), []).append(found)
    print(f"{LENGTH} tokens, {VALUE_HEADS} value heads of {WIDTH}, float32, one thread\n")
    print("| way | forward, CPU ms | forward and backward, CPU ms |\n|---|---|---|")
    for name in ways:
        one, both = (statistics.median(times[name, which]) * 1e3 for which in (False, True))
        print(f"| {name} | {one:.0f} | {both:.0f} |")


if __name__ == "__main__":
    main()
