"""Every backend against the reference in float64, and the same check as a command."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_kernels import (
    Backend,
    Mask,
    attention,
    vocab_cross_entropy,
    vocab_cross_entropy_gradient,
)
from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.check import INPUTS, KNOWN, Inputs, check, check_backend, count_checks
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import accept_all
from torch.nn import functional

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
        if "soft-cap" in case.label:
            fused = ("torch",)
        libraries = ("apex", "flash_attn", "flash_attn_3", "triton", "flex", "transformer_engine")
        others = ("grouped_mm", "conv1d", "int_mm", "scaled_mm", "scaled_grouped_mm")
        assert backend.name in (*libraries, *others, *fused)
    assert result.passed, result


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_usable_backend_on_a_gpu_equals_the_reference_in_float64(
    dtype: torch.dtype, device: torch.device, request: pytest.FixtureRequest
) -> None:
    inputs = INPUTS
    if request.config.getoption("device") == "simulated":
        # Its kernels are torch's for a CPU, which sum thousands of rows in 16 bits.
        inputs = tuple(each for each in INPUTS if each != "many")
    results = list(check(dtype, device, inputs))
    assert any(result.unsupported_reason is None for result in results)
    assert [result for result in results if not result.passed] == []


WITHOUT_GRADIENTS = {
    "attention_backward",
    "add_vocab_gradient",
    "vocab_cross_entropy",
    "vocab_cross_entropy_gradient",
    "paged_attention",
    "quantize_tensor",
    "quantized_grouped_matmul",
    "quantized_grouped_gradient",
}


def test_the_backward_pass_of_a_loss_over_parts_equals_that_of_autograd() -> None:
    """Two parts of a vocabulary, the second with padding, and label smoothing."""
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    targets, dloss = torch.tensor([0, 6, 7, 10, 3]), torch.randn(5, dtype=torch.float64)
    losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=0.2)
    (expected,) = torch.autograd.grad(losses, logits, dloss)
    padded = functional.pad(logits.detach(), (0, 3), value=9.0)
    parts = [(padded[:, :7], targets, 7), (padded[:, 7:], targets - 7, 4)]
    terms = [vocab_cross_entropy(*part) for part in parts]
    lse, picked = torch.logaddexp(terms[0][0], terms[1][0]), torch.maximum(terms[0][1], terms[1][1])
    every = terms[0][2] + terms[1][2] - 11 * lse
    torch.testing.assert_close(0.8 * (lse - picked) - 0.2 / 11 * every, losses.detach())
    found = [
        vocab_cross_entropy_gradient(part, columns, lse, dloss, valid, 0.8, 0.2 / 11)
        for part, columns, valid in parts
    ]
    torch.testing.assert_close(torch.cat(found, 1), functional.pad(expected, (0, 3)))


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.op.name not in WITHOUT_GRADIENTS],
    ids=lambda case: f"{case.op.name}-{case.label or 'plain'}",
)
def test_gradients_of_the_references_equal_finite_differences(case: Case) -> None:
    given = case.arguments(InputGenerator(torch.float64, CPU))
    leaves = [g for g in given if isinstance(g, torch.Tensor) and g.requires_grad]
    # Finite differences of every element would take minutes; this takes random directions.
    assert torch.autograd.gradcheck(
        lambda *changed: case.op.backends[-1].run(*case.op.given(*_replaced(given, changed))),
        leaves,
        fast_mode=True,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [i for i in INPUTS if i not in ("small", "large", "many")])
def test_other_inputs_give_what_the_reference_gives(inputs: Inputs, dtype: torch.dtype) -> None:
    results = list(check(dtype, CPU, (inputs,)))
    assert len(results) == count_checks(dtype, (inputs,))
    assert [result for result in results if not result.passed] == []
    usable = [result for result in results if result.unsupported_reason is None]
    assert len(usable) > len(CASES) / 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES)], ids=str
)
def test_large_inputs_give_what_the_reference_gives(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    ops = () if slow else ("attention", "rms_norm", "linear", "cross_entropy", "grouped_matmul")
    assert [result for result in check(dtype, CPU, ("large",), ops) if not result.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_give_what_the_reference_gives(dtype: torch.dtype) -> None:
    assert [result for result in check(dtype, CPU, ("many",)) if not result.passed] == []


def test_known_deviations_still_exist() -> None:
    """Which numbers of keys lose a NaN depends on the CPU: 1 to 7 with AVX2 (torch 2.13)."""
    q = torch.full((1, 1, 2, 8), torch.nan)
    lost = {"torch": 0, "reference": 0}
    for keys in range(1, 18):
        k, v = torch.ones(2, keys, 1, 2, 8)
        for backend in lost:
            out = attention(q, k, v, Mask(causal=False), backend=backend)
            lost[backend] += not out.isnan().any()
    assert lost["torch"] > 0
    assert lost["reference"] == 0
    paged = check(torch.float32, CPU, ("nan",), ("paged_attention",))
    assert any(each.known and not each.within_tolerance for each in paged)
    assert {op for op, *_ in KNOWN} == {"attention", "attention_forward", "paged_attention"}


class Wrong(torch.autograd.Function):
    """The exact GELU with a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.001


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """Reads elements one after another, independent of the strides."""
    return functional.gelu(x.as_strided(x.shape, torch.empty(x.shape).stride()))


def one_wrong_element(x: torch.Tensor) -> torch.Tensor:
    out = functional.gelu(x)
    return out + torch.zeros_like(out).index_fill(0, torch.tensor([0]), 1e-9)


def needs_rows(x: torch.Tensor) -> torch.Tensor:
    if not len(x):
        raise RuntimeError("invalid configuration argument\nfor a grid of 0 blocks")
    return functional.gelu(x)


BROKEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Inputs]] = {
    "a wrong element": (one_wrong_element, "small"),
    "NaN": (lambda x: functional.gelu(x) * torch.nan, "small"),
    "a wrong gradient": (Wrong.apply, "small"),
    "no gradient": (lambda x: functional.gelu(x).detach(), "small"),
    "a hidden NaN": (lambda x: functional.gelu(x.nan_to_num()), "nan"),
    "a hidden infinity": (lambda x: functional.gelu(x.clamp(max=1e9)), "inf"),
    "a NaN everywhere": (lambda x: functional.gelu(x) + 0 * x.sum(), "nan"),
    "strides that are not read": (neighbours, "strided"),
    "an error without rows": (needs_rows, "empty"),
    "a wrong shape": (lambda x: functional.gelu(x).flatten(), "empty"),
    "an error that grows with size": (lambda x: functional.gelu(x) + 1e-13 * len(x), "large"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_broken_kernel_fails_the_check(defect: str) -> None:
    broken, inputs = BROKEN[defect]
    gelu = next(case for case in CASES if case.op.name == "gelu")
    right = Backend("right", lambda x, _: functional.gelu(x), accept_all, "")
    wrong = Backend("wrong", lambda x, _: broken(x), accept_all, "")
    assert check_backend(gelu, right, torch.float64, CPU, inputs).passed
    assert not check_backend(gelu, wrong, torch.float64, CPU, inputs).passed


def test_an_error_of_a_backend_is_its_result() -> None:
    gelu = next(case for case in CASES if case.op.name == "gelu")
    wrong = Backend("wrong", lambda x, _: needs_rows(x), accept_all, "")
    result = check_backend(gelu, wrong, torch.float64, CPU, "empty")
    assert result.failure == "RuntimeError: invalid configuration argument"


def _replaced(given: tuple[object, ...], changed: tuple[torch.Tensor, ...]) -> list[object]:
    rest = iter(changed)
    return [next(rest) if isinstance(g, torch.Tensor) and g.requires_grad else g for g in given]
