"""Rows of experts: gradients, which depend on no order of memory accesses, and what is saved."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import permute, sort_by_expert, unpermute
from megatron_kernels.ops.moe import rows as gathered
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BACKENDS = ("torch", "reference")


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def drawn(
    tokens: int, choices: int, width: int, rows: int, none: int, dtype: torch.dtype, seed: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns tokens, rows, the order of the rows, of which some have no choice, and weights."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(-1, 4, (tokens, choices), generator=generator)
    order = sort_by_expert(experts, 4).order[:rows].clone()
    order[torch.randperm(len(order), generator=generator)[:none]] = -1
    shapes = (tokens, width), (len(order), width), (tokens, choices)
    first, second, third = (torch.randn(each, generator=generator).to(dtype) for each in shapes)
    return first, second, order, third.to(torch.promote_types(dtype, torch.float32))


def passes(
    arguments: tuple[Tensor, Tensor, Tensor, Tensor], backend: str
) -> tuple[tuple[Tensor, ...], set[str]]:
    """Returns outputs and gradients of both operations, and operations of the backward pass."""
    tokens, rows, order, weights = (
        t.clone().requires_grad_(t.is_floating_point()) for t in arguments
    )
    chosen = permute(tokens, order, weights.shape[1], backend=backend)
    summed = unpermute(rows, order, weights, backend=backend)
    with Names() as names:
        grads = torch.autograd.grad(
            (chosen, summed), (tokens, rows, weights), (arguments[1], arguments[0])
        )
    return (chosen.detach(), summed.detach(), *grads), names.found


@pytest.fixture(params=[False, True], ids=["eager", "for the compiler"])
def compiling(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs a test with the expressions of eager code, and with those that the compiler fuses."""
    with mock.patch.object(torch.compiler, "is_compiling", lambda: request.param):
        yield request.param


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_backward_pass_has_equal_bits_each_time_and_adds_to_no_memory(
    dtype: torch.dtype,
) -> None:
    arguments = drawn(300, 4, 24, 1000, 100, dtype)
    found, names = passes(arguments, "torch")
    again, _ = passes(arguments, "torch")
    assert all(map(torch.equal, found, again))
    assert names and not {name for name in names if "index_add" in name or "scatter" in name}
    assert "index_add" in passes(arguments, "reference")[1]  # the names are those of torch


@pytest.mark.usefixtures("compiling")
def test_both_backends_agree_on_drawn_rows() -> None:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(
        st.tuples(*map(st.integers, (0, 1, 1, 0, 0), (9, 5, 20, 45, 5))),
        st.sampled_from([torch.float64, torch.float32]),
        st.integers(0, 99),
    )
    def compare(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, seed: int) -> None:
        arguments = drawn(*sizes, dtype, seed)
        for ours, theirs in zip(*(passes(arguments, name)[0] for name in BACKENDS), strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    compare()


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_finite_differences(backend: str) -> None:
    tokens, rows, order, weights = drawn(6, 3, 4, 16, 3, torch.float64)
    tokens.requires_grad_(), rows.requires_grad_(), weights.requires_grad_()

    def selected(x: Tensor) -> Tensor:
        found = permute(x, order, 3, backend=backend)
        return found[order >= 0]  # a row of no choice has values, and no gradient

    assert torch.autograd.gradcheck(selected, (tokens,))
    assert torch.autograd.gradcheck(
        lambda x, share: unpermute(x, order, share, backend=backend), (rows, weights)
    )


@pytest.mark.usefixtures("compiling")
def test_sums_are_rounded_once() -> None:
    """A token whose rows are 256 and four times 1, which bfloat16 cannot add one by one."""
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    order = torch.tensor([4, 0, 3, 1, 2])
    assert unpermute(rows, order, torch.ones(1, 5)).tolist() == [[260.0]]
    tokens = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    permute(tokens, order, 5).backward(rows)
    assert tokens.grad is not None and tokens.grad.tolist() == [[260.0]]


@pytest.mark.usefixtures("compiling")
def test_a_row_that_is_not_finite_reaches_its_own_token_alone() -> None:
    order = torch.tensor([2, -1, 0, 3])  # the second choice of the first token has no row
    rows = torch.tensor([[1.0], [torch.nan], [2.0], [torch.inf]])
    weights = torch.tensor([[1.0, torch.nan], [1.0, 1.0], [torch.nan, torch.nan]])
    assert unpermute(rows, order, weights).tolist() == [[2.0], [torch.inf], [0.0]]
    tokens = torch.zeros(3, 1, requires_grad=True)
    permute(tokens, order, 2).backward(rows)
    assert tokens.grad is not None and tokens.grad.tolist() == [[2.0], [torch.inf], [0.0]]


def test_the_weighted_sum_saves_the_rows_themselves() -> None:
    _, rows, order, weights = drawn(40, 2, 16, 80, 0, torch.bfloat16)
    rows.requires_grad_(), weights.requires_grad_()
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        unpermute(rows, order, weights)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (rows, order, weights)}


@pytest.mark.parametrize("gradients", [(True, False), (False, True)])
def test_only_wanted_gradients_are_computed(gradients: tuple[bool, bool]) -> None:
    _, rows, order, weights = drawn(5, 2, 3, 10, 0, torch.float64)
    rows.requires_grad_(gradients[0]), weights.requires_grad_(gradients[1])
    with mock.patch.object(gathered, "_dots", wraps=gathered._dots) as dots:
        unpermute(rows, order, weights).sum().backward()  # type: ignore[no-untyped-call]
    assert dots.called == gradients[1]
    assert (rows.grad is not None, weights.grad is not None) == gradients


def test_a_wrong_order_of_choices_is_found() -> None:
    """The comparison with the reference fails if the sums use the order of other choices."""
    arguments = drawn(9, 3, 4, 27, 0, torch.float64)
    right, sums = passes(arguments, "reference")[0], gathered._sums

    def wrong(rows: Tensor, order: Tensor, *more: Any) -> Tensor:
        return sums(rows, order.roll(1), *more)

    with mock.patch.object(gathered, "_sums", wrong):
        found = passes(arguments, "torch")[0]
    same = [torch.allclose(one, other) for one, other in zip(found, right, strict=True)]
    assert same == [True, False, False, True, True]  # the sum, and the gradient of the gather
