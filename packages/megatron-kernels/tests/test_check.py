"""The measure of the check: errors, tolerances, where NaN may be, and how a result is judged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_kernels import Backend, op
from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.check import (
    TOLERANCES,
    Inputs,
    Result,
    check,
    check_backend,
    count_checks,
    make_arguments,
)
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.registry import accept_all
from torch import Tensor

CPU = torch.device("cpu")
F64, F32 = torch.float64, torch.float32


@op(Backend("reference", lambda x: x.clone(), accept_all, ""))
def same(x: Tensor, *, backend: str = "auto") -> Tensor:
    """Copies a tensor."""
    return same.run(backend, x)


def judged(
    numbers: list[float],
    kernel: Callable[[Tensor], Any],
    dtype: torch.dtype = F64,
    inputs: Inputs = "small",
) -> Result:
    """Returns the result of a kernel that should copy numbers."""

    def arguments(draw: InputGenerator) -> tuple[Tensor]:
        return (torch.tensor(numbers, dtype=F64).to(draw.dtype),)

    backend = Backend("kernel", kernel, accept_all, "")
    return check_backend(Case(same, "a case", arguments), backend, dtype, CPU, inputs)


def test_the_error_is_the_largest_relative_to_the_largest_above_one() -> None:
    def off(x: Tensor) -> Tensor:
        return x + torch.tensor([0.25, -0.5], dtype=x.dtype)

    assert judged([0.125, 1.0], off).error == 0.5
    assert judged([0.125, -4.0], off).error == 0.5 / 4
    assert judged([8.0, -4.0], off).error == 0.5 / 8
    assert judged([8.0, -4.0], torch.clone).error == 0.0


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("inputs", "times"), [("small", 1), ("large", 4), ("many", 1), ("nan", 1)])
def test_an_error_may_be_as_large_as_the_tolerance(
    dtype: torch.dtype, inputs: Inputs, times: int
) -> None:
    limit = times * TOLERANCES[dtype]
    above = limit * (1 + 1e-9)
    for errors, right in (
        ((limit, limit), True),
        ((above, 0.0), False),
        ((0.0, above), False),
        ((torch.nan, 0.0), False),
        ((0.0, torch.inf), False),
    ):
        result = Result("op", "", "kernel", dtype, None, *errors, inputs)
        assert result.within_tolerance is result.passed is right


def test_unsupported_calls_and_known_deviations_pass() -> None:
    wrong: Any = ("op", "", "kernel", F64)
    assert Result(*wrong, "has no such thing", 0.0, 0.0).passed
    assert Result(*wrong, None, torch.inf, 0.0, known="as ever").passed
    assert not Result(*wrong, None, torch.inf, 0.0).passed
    assert Result(*wrong, None, 0.0, 0.0).inputs == "small"


def test_tolerances_are_far_above_the_rounding_of_a_dtype_and_far_below_one() -> None:
    for dtype, limit in TOLERANCES.items():
        assert 4 < limit / torch.finfo(dtype).eps < 6000 and limit < 0.1


def spread(count: int) -> Callable[[Tensor], Tensor]:
    """Returns a kernel that makes as many of the first numbers NaN."""
    return lambda x: torch.where(torch.arange(len(x)) < count, torch.nan, x)


def test_nan_may_spread_over_an_eighth_of_the_outputs_if_the_reference_has_any() -> None:
    numbers = [float(i) for i in range(32)]
    assert judged([*numbers[:-1], torch.nan], spread(4)).passed
    assert not judged([*numbers[:-1], torch.nan], spread(5)).passed
    assert judged([*numbers[:-1], torch.inf], spread(4)).passed
    assert judged(numbers, spread(0)).passed
    assert judged(numbers, spread(1)).error == torch.inf


def test_numbers_where_the_reference_has_nan_fail() -> None:
    assert judged([1.0, torch.nan], torch.clone).error == 0.0
    assert judged([1.0, torch.nan], torch.nan_to_num).error == torch.inf
    assert judged([1.0, torch.inf], lambda x: x.clamp(max=9)).error == torch.inf


def test_outputs_of_another_shape_or_number_fail() -> None:
    assert judged([1.0, 2.0], lambda x: x[:1]).error == torch.inf
    assert judged([1.0, 2.0], lambda x: x[None]).error == torch.inf
    assert judged([1.0, 2.0], lambda x: (x, x)).error == torch.inf
    assert judged([1.0, 2.0], lambda x: ()).error == torch.inf
    assert judged([], torch.clone).error == 0.0


def test_the_error_of_a_backend_is_reported_without_a_size() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise RuntimeError

    result = judged([1.0], refuses)
    assert (result.error, result.gradient_error) == (torch.inf, torch.inf)
    assert result.failure == "RuntimeError: " and not result.passed


def test_gradients_are_those_of_a_sum_with_different_weights() -> None:
    def swapped(x: Tensor) -> Tensor:  # right values, gradients of other elements
        return x.detach() + x.flip(0) - x.flip(0).detach()

    def arguments(draw: InputGenerator) -> tuple[Tensor]:
        return (draw.normal(5),)

    backend = Backend("kernel", swapped, accept_all, "")
    result = check_backend(Case(same, "", arguments), backend, F64, CPU)
    assert result.error < 1e-15 and result.gradient_error == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("inputs", ["nan", "inf"])
def test_a_gradient_with_nan_in_the_reference_must_have_one_anywhere(inputs: Inputs) -> None:
    @op(Backend("reference", lambda x: x * x.detach(), accept_all, ""))
    def product(x: Tensor, *, backend: str = "auto") -> Tensor:
        return product.run(backend, x)

    def arguments(draw: InputGenerator) -> tuple[Tensor]:
        return (draw.normal(9),)

    def elsewhere(x: Tensor) -> Tensor:  # the value is right, the gradient is 1e9 at another one
        return x * x.detach() + (x.sum() - x.sum().detach()).nan_to_num() * 1e9

    def hidden(x: Tensor) -> Tensor:
        return x.detach() * x.detach() + (x - x.detach()).nan_to_num()

    case = Case(product, "", arguments)
    for kernel, right in ((elsewhere, True), (hidden, False)):
        result = check_backend(case, Backend("kernel", kernel, accept_all, ""), F64, CPU, inputs)
        assert result.gradient_error == (0.0 if right else torch.inf), kernel


def test_one_number_of_a_middle_row_is_spoilt_and_others_are_as_they_were() -> None:
    gelu = next(case for case in CASES if case.op.name == "gelu")
    plain = make_arguments(gelu, InputGenerator(F32, CPU), "small")[0]
    for kind, value in (("nan", torch.nan), ("inf", torch.inf)):
        spoilt = make_arguments(gelu, InputGenerator(F32, CPU), kind)[0]  # type: ignore[arg-type]
        differs = ~torch.eq(spoilt, plain)
        assert int(differs.sum()) == 1 and str(float(spoilt[differs].detach())) == str(value)
        row = int(differs.flatten(1).any(1).nonzero())
        assert 0 < row < len(plain) - 1 and spoilt.requires_grad and spoilt.is_leaf


def test_strided_inputs_are_the_numbers_with_nan_between_them() -> None:
    gelu = next(case for case in CASES if case.op.name == "gelu")
    plain = make_arguments(gelu, InputGenerator(F32, CPU), "small")[0]
    apart = make_arguments(gelu, InputGenerator(F32, CPU), "strided")[0]
    assert torch.equal(apart, plain) and apart.requires_grad and apart.is_leaf
    assert apart.stride(-1) == 2 and not apart.is_contiguous()
    memory = torch.as_strided(apart.detach(), (2 * apart.numel(),), (1,))
    assert memory[1::2].isnan().all()


def test_a_changed_argument_is_copied_for_each_run() -> None:
    changing = {"add_vocab_gradient", "vocab_cross_entropy_gradient"}
    assert {case.op.name for case in CASES if case.in_place} == changing
    for case in CASES:
        if case.in_place:
            given = make_arguments(case, InputGenerator(F64, CPU), "small")
            before = given[0].clone()
            names = {b.name for b in case.op.backends}
            results = [check_backend(case, b, F64, CPU) for b in case.op.backends]
            assert "reference" in names and all(result.passed for result in results)
            assert torch.equal(given[0], before)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_checks_are_counted_before_they_are_made(dtype: torch.dtype) -> None:
    kinds: Any = ("small", "one")
    found = list(check(dtype, CPU, kinds, ["gelu", "swiglu"]))
    assert len(found) == count_checks(dtype, kinds, ["gelu", "swiglu"])
    assert {each.op for each in found} == {"gelu", "swiglu"}
    assert {each.inputs for each in found} == {*kinds}
    assert ("reference" in {each.backend for each in found}) == (dtype is F32)
    assert {each.inputs for each in check(dtype, CPU, ops=["swiglu"])} == {"small"}
    assert count_checks(dtype, kinds) > 10 * len(found)
