"""Time of an optimizer step and its gradient norm compared with plain PyTorch.

The plain loop is `clip_grad_norm_` and fused AdamW on the same parameters. The norms are compared
with an exact sum as well, because the fast way is not always right.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from megatron_optim import Optimizer, OptimizerConfig, sum_of_squares
from megatron_parallel import Mesh, Sharding, TrainableParameters
from torch.nn import Parameter


def gpt_shapes(layers: int, hidden: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of a GPT by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocabulary, hidden),
        "positions": (512, hidden),
    }
    for layer in range(layers):
        for name, shape in {
            "qkv": (3 * hidden, hidden),
            "out": (hidden, hidden),
            "up": (4 * hidden, hidden),
            "down": (hidden, 4 * hidden),
        }.items():
            shapes[f"{layer}.{name}.weight"] = shape
            shapes[f"{layer}.{name}.bias"] = shape[:1]
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            shapes[f"{layer}.{name}"] = (hidden,)
    return shapes


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each task, measured alternately."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def step_times(layers: int, hidden: int, clip: float, repeats: int) -> tuple[int, dict[str, float]]:
    """Returns the seconds of one step, ours and plain; ``clip`` scales the gradient."""
    torch.manual_seed(0)
    shapes = gpt_shapes(layers, hidden, 4096)

    def parameters() -> dict[str, Parameter]:
        made = {name: Parameter(torch.randn(shape) / 50) for name, shape in shapes.items()}
        for parameter in made.values():
            parameter.grad = torch.randn_like(parameter) / 1000
        return made

    ours, plain = parameters(), parameters()
    table = {name: Sharding(shape) for name, shape in shapes.items()}
    optimizer = Optimizer(
        TrainableParameters(ours, table, Mesh.single()), OptimizerConfig(lr=1e-4, clip_grad=clip)
    )
    decaying = [p for p in plain.values() if p.ndim > 1]
    others = [p for p in plain.values() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decaying}, {"params": others, "weight_decay": 0.0}], lr=1e-4, fused=True
    )

    def plain_step() -> None:
        torch.nn.utils.clip_grad_norm_(plain.values(), clip)
        adam.step()

    times = interleaved({"plain": plain_step, "ours": lambda: optimizer.step(1e-4)}, repeats)
    return sum(math.prod(shape) for shape in shapes.values()), times


def norm_table(elements: int, repeats: int) -> None:
    """Prints time and error of several norms of one large fp32 gradient."""
    torch.manual_seed(0)
    gradient = torch.randn(elements)
    exact = math.sqrt(math.fsum(float(p.double().square().sum()) for p in gradient.split(10**6)))
    ways: dict[str, Callable[[], float]] = {
        "vector_norm, fp32": lambda: float(torch.linalg.vector_norm(gradient)),
        "vector_norm, float64": lambda: float(
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
        ),
        "ours": lambda: math.sqrt(float(sum_of_squares([gradient]))),
    }
    times = interleaved(ways, repeats)
    print(f"\nNorm of {elements:.0e} fp32 elements\n")
    print("| way | ms | relative error |\n|---|---|---|")
    for name, way in ways.items():
        print(f"| {name} | {times[name] * 1e3:.1f} | {abs(way() - exact) / exact:.0e} |")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--elements", type=int, default=10**8)
    arguments = parser.parse_args()
    print("Optimizer step with clipping, fp32\n")
    print("| parameters | gradient | plain ms | ours ms | ours / plain |\n|---|---|---|---|---|")
    for layers, hidden in ((4, 128), (4, 256), (8, 512)):
        for what, clip in (("clipped", 0.01), ("not clipped", 1e9)):
            count, times = step_times(layers, hidden, clip, arguments.repeats)
            plain, ours = times["plain"] * 1e3, times["ours"] * 1e3
            print(f"| {count:,} | {what} | {plain:.2f} | {ours:.2f} | {ours / plain:.2f} |")
    norm_table(arguments.elements, 5)


if __name__ == "__main__":
    main()
