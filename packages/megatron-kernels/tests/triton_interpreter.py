"""Calls of all Triton kernels in Triton's interpreter; `test_triton.py` runs them in a process.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own.
"""

import pytest
import torch
from equal_to_reference import CPU, F64, backend_of
from megatron_kernels import add_rms_norm
from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.check import Inputs, check_backend
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops.triton_op import interprets
from megatron_kernels.triton_kernels import norm as kernels
from torch import Tensor

pytestmark = pytest.mark.sampled(4)

TRITON = [case for case in CASES if any(b.name == "triton" for b in case.op.backends)]
DTYPES = (torch.float64, torch.bfloat16, torch.float32, torch.float16)
LONG = ("strided", "nan", "inf")
HALVES = {torch.bfloat16: torch.float16}  # the interpreter cuts numbers off to bfloat16
FIRST = {case.op.name: case for case in reversed(TRITON)}
CALLS = [
    pytest.param(
        case,
        dtype,
        id=f"{case.op.name}-{case.label or 'plain'}-{dtype}",
        marks=() if dtype in DTYPES[:2] else pytest.mark.slow,
    )
    for case in TRITON
    for dtype in (DTYPES if case is FIRST[case.op.name] else DTYPES[:1])
]


def test_the_interpreter_is_on_and_backends_that_never_ran_are_used_on_request_only() -> None:
    assert interprets()
    assert len({case.op.name for case in TRITON}) == 26
    for case in TRITON:
        choice = case.op.explain(*case.arguments(InputGenerator(torch.float32, CPU)))
        if backend_of(case).on_request is not None:
            assert choice.backend != "triton"
            assert "triton" in str(choice) and "never run on a GPU by this project" in str(choice)


@pytest.mark.parametrize(("case", "dtype"), CALLS)
def test_kernels_equal_the_reference_in_float64(case: Case, dtype: torch.dtype) -> None:
    if case.op.name.startswith("attention"):
        dtype = HALVES.get(dtype, dtype)
    result = check_backend(case, backend_of(case), dtype, CPU)
    assert result.unsupported_reason is None and result.passed, result


@pytest.mark.parametrize(
    "inputs",
    ["empty", "one", *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)],
)
def test_other_inputs_give_what_the_reference_gives(inputs: Inputs) -> None:
    slow = () if inputs in ("empty", "one") else ("rope", "rope_qkv")
    for name, case in FIRST.items():
        if name in slow:
            continue
        dtype = torch.float16 if name.startswith("attention") else torch.bfloat16
        result = check_backend(case, backend_of(case), dtype, CPU, inputs)
        assert result.passed, result
        reason = result.unsupported_reason
        excused = case.in_place and inputs == "strided"
        assert reason is None or excused or (name == "ssd_scan" and inputs == "empty")


def test_check_catches_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose backward pass forgets the gradient of the sum."""
    true = kernels.norm_backward

    def wrong(dy: Tensor, dsum: Tensor | None, *rest: object) -> object:
        return true(dy, None, *rest)

    (case,) = (c for c in TRITON if c.op is add_rms_norm and not c.label)
    assert check_backend(case, backend_of(case), F64, CPU).passed
    monkeypatch.setattr(kernels, "norm_backward", wrong)
    result = check_backend(case, backend_of(case), F64, CPU)
    assert result.error < 1e-12 and not result.passed
