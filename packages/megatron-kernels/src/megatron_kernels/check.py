"""Checks of every usable backend against the reference in float64, values and gradients.

A check is a case of `megatron_kernels.cases` with one kind of inputs (`INPUTS`): as the case writes
them, without rows, with one row, with hundreds, with thousands (for operations whose reference is
fast enough), not contiguous, or with a NaN or an infinity in the first tensor. Errors are within
the tolerance of the dtype.

Where the reference gives NaN or an infinity, so must a backend. It may spread it, as chunks do, but
not far over the outputs. A gradient with NaN in the reference has NaN. Other elements of gradients
are not compared then, since functions have several gradients at NaN. `KNOWN` lists deviations of
torch's own kernels, which are reported and do not fail.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator, Size
from megatron_kernels.registry import Backend, Op

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}

Outcome = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs and gradients of a call."""

Inputs = Literal["small", "empty", "one", "large", "many", "strided", "nan", "inf"]
INPUTS: Final[tuple[Inputs, ...]] = get_args(Inputs)
"""Kinds of inputs of a case."""

_VALUES: Final[dict[Inputs, float]] = {"nan": torch.nan, "inf": torch.inf}
KNOWN: Final[dict[tuple[str, str, str, Inputs], str]] = {
    (op, "torch", "cpu", inputs): "torch's kernel returns zeros for a query with NaN or an "
    "infinity, for some numbers of keys, which depend on the CPU (torch 2.13)"
    for op in ("attention", "attention_forward", "paged_attention")
    for inputs in _VALUES
}
"""Known deviations by operation, backend, type of device and inputs. Not every machine has them."""

_SIZES: Final[tuple[Size, ...]] = get_args(Size)
_SPREAD: Final = 1 / 8
"""Part of the outputs that may be NaN or infinite where the reference has numbers."""

_SLACK: Final[dict[Inputs, float]] = {"large": 4.0}
"""Times the tolerance that sums over rows may deviate, such as gradients of gains."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Both errors are the largest deviations, relative to the largest reference value if that is above
    1. They are infinite if NaN or infinities are not where they must be, and 0 if the backend does
    not support the case.

    Attributes:
        op: Name of the operation.
        case: Label of the case.
        backend: Name of the backend.
        dtype: Dtype of the inputs.
        unsupported_reason: Why the backend does not support the case; None if it does.
        error: Largest error of the outputs.
        gradient_error: Largest error of the gradients.
        inputs: Kind of the inputs.
        known: Why a deviation is known and not a defect of the backend; None if it is none.
        failure: The error that the backend raised; None if it raised none.
    """

    op: str
    case: str
    backend: str
    dtype: torch.dtype
    unsupported_reason: str | None
    error: float
    gradient_error: float
    inputs: Inputs = "small"
    known: str | None = None
    failure: str | None = None

    @property
    def within_tolerance(self) -> bool:
        """Whether both errors are within the tolerance of the dtype (NaN is not)."""
        allowed = TOLERANCES[self.dtype] * _SLACK.get(self.inputs, 1.0)
        return self.error <= allowed and self.gradient_error <= allowed

    @property
    def passed(self) -> bool:
        """Whether the backend does not support the case, or is right, or its deviation is known."""
        excused = self.unsupported_reason is not None or self.known is not None
        return excused or self.within_tolerance


def check(
    dtype: torch.dtype,
    device: torch.device,
    inputs: Sequence[Inputs] = ("small",),
    ops: Sequence[str] = (),
) -> Iterator[Result]:
    """Checks every backend of every operation.

    The reference is checked too, in dtypes other than float64.

    Args:
        dtype: Dtype of the inputs.
        device: Device of the inputs.
        inputs: Kinds of inputs.
        ops: Names of operations. Defaults to all.
    """
    for case in CASES:
        if ops and case.op.name not in ops:
            continue
        checked = case.op.backends[:-1] if dtype is torch.float64 else case.op.backends
        for kind in inputs:
            generator = InputGenerator(dtype, device)
            arguments = make_arguments(case, generator, kind)
            expected = run_exactly(case, arguments)
            for backend in checked:
                yield _compare(case, backend, generator, kind, arguments, expected)


def count_checks(dtype: torch.dtype, inputs: Sequence[Inputs], ops: Sequence[str] = ()) -> int:
    """Returns the number of results of `check`."""
    cases = [case for case in CASES if not ops or case.op.name in ops]
    return len(inputs) * sum(len(case.op.backends) - (dtype is torch.float64) for case in cases)


def check_backend(
    case: Case, backend: Backend, dtype: torch.dtype, device: torch.device, inputs: Inputs = "small"
) -> Result:
    """Runs one case with a backend in `dtype`, and with the reference in float64."""
    generator = InputGenerator(dtype, device)
    arguments = make_arguments(case, generator, inputs)
    return _compare(case, backend, generator, inputs, arguments, run_exactly(case, arguments))


def _compare(
    case: Case,
    backend: Backend,
    generator: InputGenerator,
    inputs: Inputs,
    arguments: tuple[Any, ...],
    expected: Outcome,
) -> Result:
    names = case.op.name, case.label, backend.name
    result = Result(*names, generator.dtype, None, 0.0, 0.0, inputs)
    unsupported_reason = backend.unsupported_reason(*case.op.given(*arguments))
    if unsupported_reason is not None:
        return replace(result, unsupported_reason=unsupported_reason)
    known = KNOWN.get((case.op.name, backend.name, generator.device.type, inputs))
    try:
        actual = _run(case.op, backend, _own(case, arguments))
    except Exception as error:  # noqa: BLE001 - of a kernel or its compiler; it is the result
        failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return replace(result, error=torch.inf, gradient_error=torch.inf, failure=failure)
    measures = _deviation, _lost_nan if inputs in _VALUES else _deviation
    outputs, gradients = (
        _largest(measure, found, wanted)
        for measure, found, wanted in zip(measures, actual, expected, strict=True)
    )
    return replace(result, error=outputs, gradient_error=gradients, known=known)


def run_exactly(case: Case, arguments: tuple[Any, ...]) -> Outcome:
    """Returns what the reference computes in float64."""
    exact = tuple(_in_float64(value) for value in _own(case, arguments))
    return _run(case.op, case.op.backends[-1], exact)


def _own(case: Case, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments, with a copy of what the operation changes."""
    return (arguments[0].clone(), *arguments[1:]) if case.in_place else arguments


def make_arguments(case: Case, generator: InputGenerator, inputs: Inputs) -> tuple[Any, ...]:
    """Returns the arguments of a case with one kind of inputs."""
    if inputs in _SIZES:
        sized = InputGenerator(generator.dtype, generator.device, generator.seed, inputs)
        return case.arguments(sized)
    arguments = case.arguments(generator)
    if inputs == "strided":
        return tuple(_strided(value) if _is_float(value) else value for value in arguments)
    at = next(number for number, value in enumerate(arguments) if _is_float(value))
    first = arguments[at]
    spoilt = first.detach().clone()
    spoilt[len(spoilt) // 2].view(-1)[-1] = _VALUES[inputs]
    return (*arguments[:at], spoilt.requires_grad_(first.requires_grad), *arguments[at + 1 :])


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _strided(x: Tensor) -> Tensor:
    """Returns a leaf with the same values, of which no two are neighbours in memory."""
    wide = torch.stack((x.detach(), torch.full_like(x, torch.nan)), -1)
    return wide[..., 0].requires_grad_(x.requires_grad)


def _run(op: Op[..., Any], backend: Backend, arguments: tuple[Any, ...]) -> Outcome:
    """Returns the outputs, and the gradients of a weighted sum of those with a gradient."""
    found = backend.run(*op.given(*arguments))
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    followed = [out for out in outputs if out.requires_grad]
    weights = [_weights(out) for out in followed]
    gradients: tuple[Tensor, ...] = ()
    if followed:
        gradients = torch.autograd.grad(followed, leaves, weights, materialize_grads=True)
    return tuple(_comparable(out.detach()) for out in outputs), gradients


def _comparable(out: Tensor) -> Tensor:
    """Returns numbers of 8 bits as float32, with which torch can compute."""
    return out.float() if out.is_floating_point() and out.element_size() == 1 else out


def _weights(out: Tensor) -> Tensor:
    """Returns different weights for all elements of an output."""
    steps = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64, device=out.device)
    return steps.reshape(out.shape).to(out.dtype)


def _in_float64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return torch.float64 if isinstance(value, torch.dtype) else value


def _largest(
    measure: Callable[[Tensor, Tensor], float],
    found: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
) -> float:
    """Returns the largest error of several tensors; infinity if some are missing."""
    if len(found) != len(wanted):
        return torch.inf
    return max(map(measure, found, wanted), default=0.0)


def _deviation(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest deviation; infinity if shapes differ or NaN is not where it must be."""
    if actual.shape != expected.shape:
        return torch.inf
    if not actual.numel():
        return 0.0
    finite, wanted = actual.isfinite(), expected.isfinite()
    spread = int((wanted & ~finite).sum())
    if bool((finite & ~wanted).any()) or spread > _SPREAD * int((~wanted).any()) * wanted.numel():
        return torch.inf
    scale = max(1.0, float(expected.where(wanted, 0).abs().max()))
    return float((actual.double() - expected).where(finite & wanted, 0).abs().max()) / scale


def _lost_nan(actual: Tensor, expected: Tensor) -> float:
    """Returns infinity if only the reference has NaN or infinities, else 0."""
    lost = bool(actual.isfinite().all()) and not bool(expected.isfinite().all())
    return torch.inf if lost else 0.0
