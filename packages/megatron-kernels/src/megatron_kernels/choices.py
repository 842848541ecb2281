"""Operations by name, and what a machine runs them with."""

import torch

from megatron_kernels.errors import KernelError
from megatron_kernels.ops import triton_op
from megatron_kernels.registry import AUTO, BackendChoice, Op


def operations() -> dict[str, Op[..., object]]:
    """Returns every operation by its name."""
    from megatron_kernels.cases import CASES  # not needed by programs that call operations

    return {case.op.name: case.op for case in CASES}


def find_operation(name: str) -> Op[..., object]:
    """Returns the operation with a name.

    Raises:
        KernelError: No operation has this name; the message suggests the nearest.
    """
    known = operations()
    if name not in known:
        from megatron_kernels._command import nearest

        raise KernelError(
            f"there is no operation {name!r}{nearest(name, known)} (known: {', '.join(known)})"
        )
    return known[name]


def fuses_on(op: Op[..., object], device: torch.device | str, dtype: torch.dtype) -> bool:
    """Returns whether calls that name no backend are one kernel each way on a device.

    A layer asks it once to decide between an operation that stands for several others and these.

    Args:
        op: The operation.
        device: Device of the tensors.
        dtype: Dtype of the tensors.
    """
    first = next(iter(op.automatic), None)
    if first is None or not first.fuses:
        return False
    return triton_op.unsupported_reason(torch.empty(0, device=device, dtype=dtype)) is None


def explain_on(
    op: Op[..., object],
    requested: str = AUTO,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> BackendChoice:
    """Returns which backend runs a small call of an operation on a device, and why.

    A real call may have arguments that this backend does not support. If none of the calls of
    `megatron_kernels.cases` has a backend, the choice is that of the first call.

    Args:
        op: The operation.
        requested: "auto" or the name of one backend.
        device: Device of the tensors.
        dtype: Dtype of the tensors.

    Raises:
        KernelError: No backend has the requested name.
    """
    from megatron_kernels.cases import CASES
    from megatron_kernels.inputs import InputGenerator

    generator = InputGenerator(dtype, torch.device(device))
    cases = [case for case in CASES if case.op is op]
    choices = (op.explain(*case.arguments(generator), backend=requested) for case in cases)
    first = next(choices)
    found = (choice for choice in (first, *choices) if choice.backend is not None)
    return next(found, first)
