"""What tests of Triton kernels share: calls that are compared with the reference."""

from typing import Any

import torch
from megatron_kernels import Backend, Op
from megatron_kernels.case import Case
from megatron_kernels.check import check_backend

CPU, F64 = torch.device("cpu"), torch.float64


def backend_of(case: Case) -> Backend:
    """Returns our kernels for a call."""
    return case.op.backend("triton")


def both_equal(op: Op[..., Any], arguments: tuple[object, ...]) -> None:
    """Compares values and gradients of the kernels with those of the reference, in float64."""
    case = Case(op, "", lambda _: arguments)
    result = check_backend(case, backend_of(case), F64, CPU)
    assert result.unsupported_reason is None and result.passed, result
