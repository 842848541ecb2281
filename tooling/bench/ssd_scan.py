"""Compares the scan of Mamba-2 in chunks, token by token, and that of transformers; interleaved.

Forward and backward pass of one layer's scan in fp32 on one rank: `ssd_scan` with the backends
``chunked`` and ``reference``, and the path of transformers without compiled kernels, which is the
peer if it is installed. Milliseconds are medians of CPU time; peak bytes are torch's largest
allocation in one pass, beyond the memory allocated before it. The largest difference of outputs is
that to the recurrence.

    OMP_NUM_THREADS=1 python tooling/bench/ssd_scan.py [--repeats 5]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median

import torch
from gradient_fusion import peak_bytes
from megatron_kernels import ssd_scan
from torch import Tensor

HEADS, WIDTH, GROUPS, STATE, CHUNK = 12, 64, 1, 64, 64
LENGTHS = (256, 1024)


def inputs(length: int) -> list[Tensor]:
    """Returns values, steps, decays, B, C, factors of the values and biases of the steps."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = [draw(length, 1, HEADS, WIDTH), draw(length, 1, HEADS), -draw(HEADS).exp()]
    found += [draw(length, 1, GROUPS, STATE) for _ in range(2)]
    found += [torch.ones(HEADS), draw(HEADS) - 4]
    return [each.requires_grad_() for each in found]


def theirs(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor
) -> Tensor:
    """Returns the output of transformers' scan, in our order of dims."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    swapped = (t.transpose(0, 1) for t in (x, dt))
    values, steps = swapped
    found: Tensor = mamba2_chunk_scan(
        values,
        steps,
        a,
        b.transpose(0, 1),
        c.transpose(0, 1),
        CHUNK,
        D=d,
        dt_bias=bias,
        dt_softplus=True,
    )
    return found.transpose(0, 1)


def ours(backend: str, *given: Tensor) -> Tensor:
    """Returns the output of our scan."""
    return ssd_scan(*given, chunk_size=CHUNK, backend=backend).output


WAYS: dict[str, Callable[..., Tensor]] = {
    "chunked": partial(ours, "chunked"),
    "token by token": partial(ours, "reference"),
}
if find_spec("transformers") is not None:
    WAYS["transformers"] = theirs


def run(way: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Runs a forward and a backward pass."""
    for each in given:
        each.grad = None
    way(*given).sum().backward()


def seconds(once: Callable[[], None]) -> float:
    """Returns the CPU time of one pass."""
    start = time.process_time()
    once()
    return time.process_time() - start


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| tokens | way | ms | peak MiB | difference |\n|---|---|---|---|---|")
    for length in LENGTHS:
        given = inputs(length)
        exact = WAYS["token by token"](*given).detach()
        passes = {name: partial(run, way, given) for name, way in WAYS.items()}
        peaks = {name: peak_bytes(once) / 2**20 for name, once in passes.items()}
        taken: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(repeats):
            for name, once in passes.items():
                taken[name].append(seconds(once))
        for name, way in WAYS.items():
            far = float((way(*given).detach() - exact).abs().max())
            time_ms = f"{1e3 * median(taken[name]):.0f}"
            print(f"| {length} | {name} | {time_ms} | {peaks[name]:.0f} | {far:.0e} |", flush=True)


if __name__ == "__main__":
    main()
