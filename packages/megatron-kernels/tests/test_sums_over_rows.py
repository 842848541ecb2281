"""Sums over many rows in 16 bits: in torch's kernels for CPUs, some add up in 16 bits."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import run_script
from megatron_kernels import add_layer_norm, layer_norm, select_rows, vocab_embedding
from megatron_kernels.check import check
from megatron_kernels.ops.norm import summed_rows
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
ROWS = 10_000
HALVES = (torch.bfloat16, torch.float16)
SUMS = (
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "bias_gelu",
    "bias_swiglu",
    "bias_dropout_add",
    "linear",
    "vocab_embedding",
    "causal_conv",
    "grouped_matmul",
    "cross_entropy",
)
"""Operations with a gradient that is a sum over rows."""


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_over_thousands_of_rows_are_those_of_the_reference_in_float64(
    dtype: torch.dtype,
) -> None:
    results = list(check(dtype, CPU, ("many",), SUMS))
    assert {result.op for result in results} == set(SUMS)
    assert [result for result in results if not result.passed] == []


def gradients_of_ones(norm: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the gradients of gain and shift, of which the shift's is the number of rows."""
    x = torch.randn(ROWS, 8, dtype=torch.float64).to(dtype)
    gain, shift = torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)
    leaves = [gain.requires_grad_(), shift.requires_grad_()]
    y = norm(x, *leaves)
    return list(torch.autograd.grad(y, leaves, torch.ones_like(y)))


NORMS: dict[str, Callable[..., Tensor]] = {
    "auto": layer_norm,
    "torch": lambda *operands: layer_norm(*operands, backend="torch"),
    "batch-invariant": lambda *operands: layer_norm(*operands, backend="batch-invariant"),
    "reference": lambda *operands: layer_norm(*operands, backend="reference"),
    "1 + weight": lambda *operands: layer_norm(*operands, zero_centered=True),
    "add": lambda x, *operands: add_layer_norm(x, torch.zeros_like(x), *operands)[1],
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_a_shift_counts_the_rows(name: str, dtype: torch.dtype) -> None:
    _, of_shift = gradients_of_ones(NORMS[name], dtype)
    assert of_shift.tolist() == [float(torch.tensor(ROWS, dtype=dtype))] * 8  # 9984 in bfloat16


def test_torch_adds_up_the_rows_in_bfloat16() -> None:
    """Shows that the test above can fail: torch's own backward pass gives 256 on one thread."""
    _, of_shift = gradients_of_ones(
        lambda x, gain, shift: functional.layer_norm(x, (8,), gain, shift), torch.bfloat16
    )
    assert max(of_shift.tolist()) < ROWS / 2


def test_the_check_finds_sums_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_rows, "sums_rows_in_16_bits", lambda x: False)
    failed = {r.op for r in check(torch.bfloat16, CPU, ("many",), SUMS) if not r.passed}
    assert failed == {"layer_norm", "add_layer_norm"}


class RowsOfNorms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the numbers of rows of each call of torch's backward pass of LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_layer_norm_backward.default:
            self.counts.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("elements", "slices"), [(1, [1] * 7), (24, [3, 3, 1]), (31, [3, 3, 1]), (56, [7])]
)
def test_gradients_are_summed_over_slices_of_rows(
    elements: int, slices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summed_rows, "_ELEMENTS", elements)
    operands = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((7, 8), (8,), (8,))]
    exact = [x.detach().double().requires_grad_() for x in operands]
    with RowsOfNorms() as seen:
        found = torch.autograd.grad(layer_norm(*operands).sum(), operands)
    expected = torch.autograd.grad(layer_norm(*exact).sum(), exact)
    assert seen.counts == slices
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)


def test_rows_are_selected_by_torchs_embedding_where_it_adds_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, true = [], functional.embedding
    monkeypatch.setattr(functional, "embedding", lambda *given: calls.append(given) or true(*given))
    weight, indices = torch.ones(3, 2), torch.tensor([[0], [2]])
    select_rows(weight, indices)
    assert not calls
    assert select_rows(weight.to("meta"), indices.to("meta")).shape == (2, 1, 2)
    assert len(calls) == 1
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(select_rows(weight, indices), torch.ones(2, 1, 2))
    assert len(calls) == 2


@pytest.mark.parametrize("frozen", [(1, 2), (0, 2), (1,)], ids=str)
def test_frozen_parameters_have_no_gradient(frozen: tuple[int, ...]) -> None:
    draws = [torch.randn(shape).bfloat16() for shape in ((6, 2, 8), (8,), (8,))]
    operands = [x.requires_grad_(index not in frozen) for index, x in enumerate(draws)]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in operands]
    for inputs in (operands, exact):
        y = layer_norm(*inputs)
        y.backward(torch.ones_like(y))
    for found, expected in zip(operands, exact, strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if found.grad is not None and expected.grad is not None:
            torch.testing.assert_close(found.grad.double(), expected.grad, rtol=2e-2, atol=2e-2)


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": select_rows,
    "auto": vocab_embedding,
    "torch": lambda weight, tokens: vocab_embedding(weight, tokens, backend="torch"),
    "reference": lambda weight, tokens: vocab_embedding(weight, tokens, backend="reference"),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_a_frequent_row_counts_its_tokens(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 8).to(dtype).requires_grad_()
    tokens = torch.full((10, ROWS // 10), 3)
    tokens[0, 0] = 1
    rows = LOOKUPS[name](weight, tokens)
    torch.testing.assert_close(rows, weight.detach()[tokens], rtol=0, atol=0)
    (found,) = torch.autograd.grad(rows, weight, torch.ones_like(rows))
    expected = torch.tensor([0, 1, 0, ROWS - 1, 0], dtype=dtype)
    assert torch.equal(found, expected[:, None].expand(5, 8))


COMPILED = """
import torch
from megatron_kernels import layer_norm, select_rows

for dtype in (torch.bfloat16, torch.float16):
    count = float(torch.tensor(10_000, dtype=dtype))
    x, gain = torch.randn(10_000, 8).to(dtype), torch.ones(8, dtype=dtype)
    shift = torch.zeros(8, dtype=dtype, requires_grad=True)
    y = torch.compile(lambda *operands: layer_norm(*operands), fullgraph=True)(x, gain, shift)
    (found,) = torch.autograd.grad(y, shift, torch.ones_like(y))
    assert found.tolist() == [count] * 8, found
    weight = torch.randn(5, 8).to(dtype).requires_grad_()
    rows = torch.compile(select_rows, fullgraph=True)(weight, torch.full((10_000,), 3))
    (found,) = torch.autograd.grad(rows, weight, torch.ones_like(rows))
    assert found[3].tolist() == [count] * 8, found
"""


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++"))), reason="needs a C++ compiler")
def test_generated_code_adds_up_in_float32() -> None:
    run_script(COMPILED)
