"""Time of an optimizer step and its gradient norm compared with plain PyTorch.

The plain loop is `clip_grad_norm_(foreach=True)` and `AdamW(fused=True)` on the same parameters.
Other rows are bf16 parameters with fp32 main parameters, and one rank of several with a distributed
optimizer: the rank runs alone, without gathering the parameters of other ranks. All rows are
measured alternately; ratios are medians of those within a round, in wall time and in CPU time. The
norms are compared with an exact sum as well, because the fast way is not
always right.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from megatron_optim import Optimizer, OptimizerConfig, sum_of_squares
from megatron_parallel import (
    DataParallelConfig,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    ParameterBuffers,
    Sharding,
    TrainableParameters,
)
from torch import nn
from torch.nn import Parameter

PLAIN, OURS = "plain, fp32", "ours, fp32"
HALF = "ours, bf16 with fp32 main parameters"


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


class Seconds(NamedTuple):
    """Seconds of one run of a task: on the clock, and of all threads."""

    wall: float
    cpu: float


Clock = Literal["wall", "cpu"]


def rounds(
    tasks: dict[str, Callable[[], object]],
    repeats: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[Seconds]]:
    """Returns the seconds of each task in each round, measured alternately.

    Args:
        tasks: The tasks by name.
        repeats: How often each is measured, after a run that is not.
        before: Called with the name before each run, outside of the measurement.
    """
    found: dict[str, list[Seconds]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            before(name)
            wall, cpu = time.perf_counter(), time.process_time()
            task()
            found[name].append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))
    return {name: values[1:] for name, values in found.items()}


def median(values: Iterable[Seconds], clock: Clock = "wall") -> float:
    """Returns the median seconds of a task."""
    return statistics.median(getattr(each, clock) for each in values)


def ratio(values: Iterable[Seconds], others: Iterable[Seconds], clock: Clock) -> float:
    """Returns the median of a task's seconds over those of another in the same round."""
    pairs = zip(values, others, strict=True)
    return statistics.median(getattr(one, clock) / getattr(other, clock) for one, other in pairs)


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

    times = rounds({"plain": plain_step, "ours": lambda: optimizer.step(1e-4)}, repeats)
    count = sum(math.prod(shape) for shape in shapes.values())
    return count, {name: median(values) for name, values in times.items()}


def steps_of_one_size(layers: int, hidden: int, repeats: int) -> None:
    """Prints the seconds of a step of parameters in several forms."""
    torch.manual_seed(0)
    shapes = {
        name: shape
        for name, shape in gpt_shapes(layers, hidden, 0).items()
        if name not in ("embedding", "positions") and "norm" not in name
    }
    table = {name: Sharding(shape) for name, shape in shapes.items()}
    config = OptimizerConfig(lr=1e-4, clip_grad=1.0)
    count = sum(math.prod(shape) for shape in shapes.values())
    clipped: dict[str, list[torch.Tensor]] = {}

    def drawn(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
        return {n: Parameter((torch.randn(s) / 50).to(dtype)) for n, s in shapes.items()}

    def whole(name: str, dtype: torch.dtype) -> Callable[[], object]:
        parameters = drawn(dtype)
        gradients = {name: torch.randn(p.shape) / 100 for name, p in parameters.items()}
        clipped[name] = [*gradients.values()]
        trainable = TrainableParameters(
            parameters, table, Mesh.single(), gradients=lambda: gradients
        )
        optimizer = Optimizer(trainable, config)
        return lambda: optimizer.step(1e-4)

    def plain() -> Callable[[], object]:
        parameters = drawn()
        clipped[PLAIN] = [torch.randn_like(parameter) / 100 for parameter in parameters.values()]
        for parameter, gradient in zip(parameters.values(), clipped[PLAIN], strict=True):
            parameter.grad = gradient
        decaying = [p for p in parameters.values() if p.ndim > 1]
        others = [p for p in parameters.values() if p.ndim == 1]
        groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=1e-4, fused=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0, foreach=True)
            adam.step()

        return step

    def shard(name: str, ranks: int) -> tuple[Callable[[], object], int]:
        with Mesh.imagined(ParallelLayout(dp=ranks)) as mesh:
            parameters = drawn()
            module = nn.ParameterDict({n.replace(".", "_"): p for n, p in parameters.items()})
            sharded = {n.replace(".", "_"): s for n, s in table.items()}
            data_parallel = DataParallelConfig(use_distributed_optimizer=True)
            named = dict(module.named_parameters())
            buffers = GradientBuffers(named, sharded, mesh, data_parallel)
            shards = ParameterBuffers(module, buffers, sharded)
            trainable = TrainableParameters(
                named, sharded, mesh, gradients=buffers.gradients, shards=[shards]
            )
            optimizer = Optimizer(trainable, config)
            buffers.begin(last=True)
            buffers.finish()
            clipped[name] = [*optimizer.gradients().values()]
            for gradient in clipped[name]:
                gradient.normal_(0, 0.01)
            elements = sum(t.numel() for t in optimizer.main.tensors.values())
        # Processes of an imagined mesh would copy the parameters of all ranks.
        optimizer.main.publish = lambda: None  # type: ignore[method-assign]
        return lambda: optimizer.step(1e-4), elements

    tasks = {
        PLAIN: plain(),
        OURS: whole(OURS, torch.float32),
        HALF: whole(HALF, torch.bfloat16),
    }
    updated = dict.fromkeys(tasks, count)
    for ranks in (2, 4):
        name = f"{OURS}, one of {ranks} ranks"
        tasks[name], updated[name] = shard(name, ranks)

    def restore(name: str) -> None:  # a gradient that was clipped would not be clipped again
        torch._foreach_mul_(clipped[name], 100.0)

    times = rounds(tasks, repeats, restore)
    threads = torch.get_num_threads()
    print(
        f"\nOne step of {count:,} parameters in {len(shapes)} tensors, clipped, {threads} threads\n"
    )
    print(
        "| step | parameters updated | ms | / plain | / ours, fp32 | CPU / plain | / ours, fp32 |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    clocks: tuple[Clock, ...] = ("wall", "cpu")
    for name, values in times.items():
        ratios = (ratio(values, times[o], clock) for clock in clocks for o in (PLAIN, OURS))
        numbers = " | ".join(f"{each:.2f}" for each in ratios)
        print(f"| {name} | {updated[name]:,} | {median(values) * 1e3:.1f} | {numbers} |")


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
    times = {name: median(values) for name, values in rounds(ways, repeats).items()}
    print(f"\nNorm of {elements:.0e} fp32 elements\n")
    print("| way | ms | relative error |\n|---|---|---|")
    for name, way in ways.items():
        print(f"| {name} | {times[name] * 1e3:.1f} | {abs(way() - exact) / exact:.0e} |")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--elements", type=int, default=10**8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("Optimizer step with clipping, fp32\n")
    print("| parameters | gradient | plain ms | ours ms | ours / plain |\n|---|---|---|---|---|")
    for layers, hidden in ((4, 128), (4, 256), (8, 512)):
        for what, clip in (("clipped", 0.01), ("not clipped", 1e9)):
            count, times = step_times(layers, hidden, clip, arguments.repeats)
            plain, ours = times["plain"] * 1e3, times["ours"] * 1e3
            print(f"| {count:,} | {what} | {plain:.2f} | {ours:.2f} | {ours / plain:.2f} |")
    steps_of_one_size(50, 408, arguments.repeats)
    norm_table(arguments.elements, 5)


if __name__ == "__main__":
    main()
