"""Every backend against the reference in float64, and the same check as a command."""

import pytest
import torch
from megatron_kernels import Backend
from megatron_kernels.cases import CASES, Case, InputGenerator
from megatron_kernels.check import check, check_backend

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PAIRS = [
    pytest.param(case, backend, id=f"{case.op.name}-{case.label or 'plain'}-{backend.name}")
    for case in CASES
    for backend in case.op.backends
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_values_and_gradients_equal_the_reference_in_float64(
    case: Case, backend: Backend, dtype: torch.dtype
) -> None:
    result = check_backend(case, backend, dtype, CPU)
    if result.unsupported_reason is not None:
        fused = ("torch", "batch-invariant") if "dropout" in case.label else ("tiles",)
        assert backend.name in ("apex", "flash_attn", "grouped_mm", "conv1d", *fused)
    assert result.passed, result


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_usable_backend_on_a_gpu_equals_the_reference_in_float64(
    dtype: torch.dtype, device: torch.device
) -> None:
    results = list(check(dtype, device))
    assert any(result.unsupported_reason is None for result in results)
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.op.name != "attention_backward"],  # it has no gradient
    ids=lambda case: f"{case.op.name}-{case.label or 'plain'}",
)
def test_gradients_of_the_references_equal_finite_differences(case: Case) -> None:
    given = case.arguments(InputGenerator(torch.float64, CPU))
    leaves = [g for g in given if isinstance(g, torch.Tensor) and g.requires_grad]
    # Finite differences of every element would take minutes; this takes random directions.
    assert torch.autograd.gradcheck(
        lambda *changed: case.op.backends[-1].run(*_replaced(given, changed)),
        leaves,
        fast_mode=True,
    )


def test_a_backend_with_one_wrong_element_fails_the_check() -> None:
    def nearly(x: torch.Tensor, approximate: str) -> torch.Tensor:
        out = torch.nn.functional.gelu(x, approximate=approximate)
        return out + torch.zeros_like(out).index_fill(0, torch.tensor([0]), 1e-9)

    gelu = next(case for case in CASES if case.op.name == "gelu")
    wrong = Backend("nearly", nearly, lambda *_: None, "")
    assert not check_backend(gelu, wrong, torch.float64, CPU).passed


def test_a_backend_with_a_nan_fails_the_check() -> None:
    wrong = Backend("nan", lambda x, _: x * torch.nan, lambda *_: None, "")
    gelu = next(case for case in CASES if case.op.name == "gelu")
    assert not check_backend(gelu, wrong, torch.float32, CPU).passed


def _replaced(given: tuple[object, ...], changed: tuple[torch.Tensor, ...]) -> list[object]:
    rest = iter(changed)
    return [next(rest) if isinstance(g, torch.Tensor) and g.requires_grad else g for g in given]
