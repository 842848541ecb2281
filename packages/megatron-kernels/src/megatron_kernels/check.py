"""Checks of every usable backend against the reference in float64, values and gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_kernels.cases import CASES, Case, InputGenerator
from megatron_kernels.registry import Backend

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Both errors are the largest deviations, relative to the largest reference value if that is above
    1. They are 0 if the backend does not support the case.

    Attributes:
        op: Name of the operation.
        case: Label of the case.
        backend: Name of the backend.
        dtype: Dtype of the inputs.
        unsupported_reason: Why the backend does not support the case; None if it does.
        error: Largest error of the outputs.
        gradient_error: Largest error of the gradients.
    """

    op: str
    case: str
    backend: str
    dtype: torch.dtype
    unsupported_reason: str | None
    error: float
    gradient_error: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within the tolerance of the dtype (NaN is not)."""
        allowed = TOLERANCES[self.dtype]
        return self.unsupported_reason is not None or (
            self.error <= allowed and self.gradient_error <= allowed
        )


def check(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    """Checks every backend of every operation on small inputs.

    The reference is checked too, in dtypes other than float64.
    """
    for case in CASES:
        checked = case.op.backends[:-1] if dtype is torch.float64 else case.op.backends
        for backend in checked:
            yield check_backend(case, backend, dtype, device)


def check_backend(case: Case, backend: Backend, dtype: torch.dtype, device: torch.device) -> Result:
    """Runs one case with a backend in `dtype`, and with the reference in float64."""
    arguments = case.arguments(InputGenerator(dtype, device))
    name, reference = case.op.name, case.op.backends[-1]
    unsupported_reason = backend.unsupported_reason(*arguments)
    if unsupported_reason is not None:
        return Result(name, case.label, backend.name, dtype, unsupported_reason, 0.0, 0.0)
    exact = tuple(_in_float64(value) for value in arguments)
    expected, actual = _run(reference, exact), _run(backend, arguments)
    outputs, gradients = (
        max((_deviation(a, e) for a, e in zip(found, known, strict=True)), default=0.0)
        for found, known in zip(actual, expected, strict=True)
    )
    return Result(name, case.label, backend.name, dtype, None, outputs, gradients)


def _run(
    backend: Backend, arguments: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the outputs, and the gradients of a weighted sum of those with a gradient."""
    found = backend.run(*arguments)
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    followed = [out for out in outputs if out.requires_grad]
    weights = [_weights(out) for out in followed]
    gradients = torch.autograd.grad(followed, leaves, weights) if followed else ()
    return tuple(out.detach() for out in outputs), gradients


def _weights(out: Tensor) -> Tensor:
    """Returns different weights for all elements of an output."""
    steps = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64, device=out.device)
    return steps.reshape(out.shape).to(out.dtype)


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def _deviation(actual: Tensor, expected: Tensor) -> float:
    scale = max(1.0, float(expected.abs().max()))
    return float((actual.double() - expected).abs().max()) / scale
