"""Times of every usable backend, and their share of what the device can do.

All backends of a call run interleaved, round by round, together with a copy and a matrix product.
The fastest of these give the bytes and floating-point operations of a second that bound the call.
Figures of backends are medians over rounds. A call is bound by the longer of the times that its
products and its bytes need (`megatron_kernels.workload`).
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from megatron_kernels._compat import occupy_device
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import Backend
from megatron_kernels.workload import SHAPES, Workload, WorkSize, least_bytes
from megatron_kernels.workloads import WORKLOADS

ROUNDS: Final = 7
_LAUNCHES: Final = 5e-3
"""Seconds in which the host starts all kernels of a call, before a GPU begins with them."""
_COPY_BYTES: Final = {"cpu": 1 << 26, "cuda": 1 << 30}
_PRODUCT_SIZE: Final = {"cpu": 1_024, "cuda": 8_192}


@dataclass(frozen=True)
class Measurement:
    """Times of one backend for one call.

    Attributes:
        title: Operation and call.
        backend: Name of the backend; the first one is what a call runs that names none.
        reason: Why the backend does not run; None if it does.
        label: Why only a call that names it uses it; None if others do.
        forward: Seconds of the forward pass without gradients.
        both: Seconds of both passes; 0 if no output has a gradient.
        products: Floating-point operations of matrix products, in both passes.
        moved: Bytes that both passes must move at least.
        bound: Seconds that products and bytes of both passes take at the rates of the device.
        by_products: Whether products are the bound, and not bytes.
    """

    title: str
    backend: str
    reason: str | None
    label: str | None
    forward: float = 0.0
    both: float = 0.0
    products: float = 0.0
    moved: float = 0.0
    bound: float = 0.0
    by_products: bool = False

    @property
    def share(self) -> float:
        """The bound as a share of the time of both passes."""
        return self.bound / (self.both or self.forward)

    @property
    def rate(self) -> float:
        """Floating-point operations or bytes a second, whichever is the bound."""
        return (self.products if self.by_products else self.moved) / (self.both or self.forward)


@dataclass(frozen=True)
class Rates:
    """What the device does in a second, at best in the same rounds.

    Attributes:
        bytes: Bytes that a copy reads and writes.
        flops: Floating-point operations of a matrix product.
    """

    bytes: float
    flops: float


Report = tuple[Rates, tuple[Measurement, ...]]
"""The rates and the measurements of one call."""


def bench(
    device: torch.device,
    dtype: torch.dtype,
    size: WorkSize = "medium",
    ops: Sequence[str] = (),
    rounds: int = ROUNDS,
    backends: Sequence[str] = (),
) -> Iterator[Report]:
    """Measures every backend of every call.

    Args:
        device: Device of the tensors.
        dtype: Dtype of the tensors.
        size: Sizes of the calls.
        ops: Names of operations. Defaults to all.
        rounds: Number of rounds.
        backends: Names of backends. Defaults to all.
    """
    for workload in workloads_of(ops, backends):
        yield measure(workload, device, dtype, size, rounds, backends)
        gc.collect()  # gradients of the largest calls


def workloads_of(ops: Sequence[str], backends: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Returns the calls of some operations with some backends, or all."""
    return tuple(
        each
        for each in WORKLOADS
        if (not ops or each.op.name in ops)
        and (not backends or any(backend.name in backends for backend in each.op.backends))
    )


def measure(
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype,
    size: WorkSize,
    rounds: int,
    backends: Sequence[str] = (),
) -> Report:
    """Measures backends of one call, or all, interleaved with a copy and a product."""
    shape = SHAPES[size]
    arguments = workload.arguments(InputGenerator(dtype, device), shape)
    passed = workload.op.given(*arguments)
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    chosen = [b for b in workload.op.backends if not backends or b.name in backends]
    found = [
        Measurement(
            workload.title,
            backend.name,
            backend.unsupported_reason(*passed),
            backend.on_request,
        )
        for backend in chosen
    ]
    clock = _Clock(device)
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("device", "copy"): _copy(device),
        ("device", "product"): _product(device, dtype),
    }
    outputs: tuple[Tensor, ...] = ()
    for number, backend in enumerate(chosen):
        if found[number].reason is not None:
            continue
        try:
            outputs = _outputs(backend, passed)
        except Exception as error:  # noqa: BLE001 - of a kernel or its compiler; it is the result
            first = next(iter(str(error).splitlines()), "")
            found[number] = replace(found[number], reason=f"{type(error).__name__}: {first}")
            continue
        runs[backend.name, "forward"] = _forward(backend, passed)
        if any(output.requires_grad for output in outputs):
            runs[backend.name, "both"] = _both(backend, passed, leaves, outputs)
    measured = clock.measure(runs, rounds)
    times = {key: median(each) for key, each in measured.items()}
    rates = Rates(
        2 * _COPY_BYTES[device.type] / min(measured["device", "copy"]),
        2 * _PRODUCT_SIZE[device.type] ** 3 / min(measured["device", "product"]),
    )
    backward = any(kind == "both" for _, kind in runs)
    forward_bytes, all_bytes = least_bytes(arguments, outputs)
    moved = float(all_bytes if backward else forward_bytes)
    products = workload.products(shape) * (1 + workload.backward if backward else 1)
    by_products = products / rates.flops > moved / rates.bytes
    bound = max(products / rates.flops, moved / rates.bytes)
    return rates, tuple(
        each
        if each.reason is not None
        else replace(
            each,
            forward=times[each.backend, "forward"],
            both=times.get((each.backend, "both"), 0.0),
            products=products,
            moved=moved,
            bound=bound,
            by_products=by_products,
        )
        for each in found
    )


class _Clock:
    """Measures seconds on a device: CPU time of one thread, events of a GPU, wall-clock else.

    A GPU is kept busy until the host has started all kernels, so that its time is that of the
    kernels and not of the host, which may take longer to start them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        self.now = time.process_time if one_thread else time.perf_counter

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the seconds of one run."""
        if self.device.type != "cuda":
            began = self.now()
            run()
            return self.now() - began
        event: Any = torch.cuda.Event  # untyped
        first, last = (event(enable_timing=True) for _ in range(2))
        occupy_device(_LAUNCHES)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def measure(
        self, runs: dict[tuple[str, str], Callable[[], object]], rounds: int
    ) -> dict[tuple[str, str], list[float]]:
        """Returns the seconds of each run, interleaved; a first round is not counted."""
        times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for number in range(rounds + 1):
            for key, run in runs.items():
                seconds = self.seconds(run)
                if number:
                    times[key].append(max(seconds, 1e-9))
        return times


def _copy(device: torch.device) -> Callable[[], object]:
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    size = _PRODUCT_SIZE[device.type]
    x, y = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return lambda: x @ y


def _outputs(backend: Backend, passed: tuple[Any, ...]) -> tuple[Tensor, ...]:
    result = backend.run(*passed)
    return result if isinstance(result, tuple) else (result,)


def _forward(backend: Backend, passed: tuple[Any, ...]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return backend.run(*passed)

    return run


def _both(
    backend: Backend, passed: tuple[Any, ...], leaves: list[Tensor], outputs: tuple[Tensor, ...]
) -> Callable[[], object]:
    gradients = [torch.ones_like(y) for y in outputs if y.requires_grad]

    def run() -> object:
        followed = [y for y in _outputs(backend, passed) if y.requires_grad]
        return torch.autograd.grad(followed, leaves, gradients, allow_unused=True)

    return run
