"""The gated delta rule: chunks against steps, steps against numbers computed by hand."""

import math
from typing import Any

import pytest
import torch
from megatron_kernels import KernelError, gated_delta_rule
from megatron_kernels.ops.ssm.gated_delta_rule import CHUNK
from torch import Tensor

F64 = torch.float64
both = pytest.mark.parametrize("backend", ["torch", "reference"])
Leaves = dict[str, Tensor]


def drawn(length: int, batch: int = 2, *, dtype: torch.dtype = F64, state: bool = True) -> Leaves:
    """Returns inputs of 2 key heads and 6 value heads."""
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=F64)

    found = {
        "q": normal(length, batch, 2, 5),
        "k": normal(length, batch, 2, 5),
        "v": normal(length, batch, 6, 3),
        "log_decay": -normal(length, batch, 6).exp() / 8,
        "beta": normal(length, batch, 6).sigmoid(),
    }
    if state:
        found["initial_state"] = normal(batch, 6, 5, 3)
    return {name: value.to(dtype).requires_grad_() for name, value in found.items()}


def run(given: Leaves, backend: str, **options: Any) -> list[Tensor]:
    """Returns output and state, then the gradients of a weighted sum of both."""
    found = gated_delta_rule(**given, l2_norm=True, backend=backend, **options)
    draw = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=draw, dtype=F64)).sum() for x in found)
    assert isinstance(total, Tensor)
    return [*found, *torch.autograd.grad(total, list(given.values()))]


def documents(*lengths: int) -> Tensor:
    """Returns the ids of documents, and of as much padding for a negative length."""
    ids = [i if length > 0 else -1 for i, length in enumerate(lengths) for _ in range(abs(length))]
    return torch.tensor([ids], dtype=torch.int32)


ENDS = {
    "none": None,
    "within chunks": documents(20, 3, 90, 1, 1, 35),
    "at chunks": documents(CHUNK, CHUNK, 22),
    "padding": documents(-4, 30, -50, 2, 50, -14),
    "padding alone": documents(-150),
}


@pytest.mark.parametrize("ends", ENDS)
def test_chunks_equal_steps_forward_and_backward(ends: str) -> None:
    given, ids = drawn(150), ENDS[ends]
    ids = None if ids is None else torch.cat((ids, ids.flip(1)))
    steps = run(given, "reference", document_ids=ids)
    chunks = run(given, "torch", document_ids=ids)
    for step, chunk in zip(steps, chunks, strict=True):
        torch.testing.assert_close(chunk, step, rtol=1e-12, atol=1e-12)


@both
def test_documents_of_one_sequence_equal_documents_alone(backend: str) -> None:
    given = drawn(130, 1, state=False)
    y, state = gated_delta_rule(**given, document_ids=documents(70, -9, 51), backend=backend)
    first = gated_delta_rule(**{n: x[:70] for n, x in given.items()}, backend=backend)
    second = gated_delta_rule(**{n: x[79:] for n, x in given.items()}, backend=backend)
    assert not y[70:79].any()
    for found, expected in ((y[:70], first[0]), (y[79:], second[0]), (state, second[1])):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@both
def test_a_sequence_in_pieces_equals_the_whole(backend: str) -> None:
    given = drawn(140)
    state, parts = given.pop("initial_state"), []
    whole = gated_delta_rule(**given, initial_state=state, backend=backend)
    for piece in (slice(0, 75), slice(75, 139), slice(139, 140)):
        part = {name: x[piece] for name, x in given.items()}
        y, state = gated_delta_rule(**part, initial_state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts), whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, whole[1], rtol=1e-12, atol=1e-12)


@both
def test_two_tokens_by_hand(backend: str) -> None:
    def column(*numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=F64).view(2, 1, 1, -1)

    q, k, v = column(1, 1, 0, 2), column(3, 4, 0, 1), column(2, 7)
    rates = torch.tensor([0.5, 0.25], dtype=F64).view(2, 1, 1)
    y, state = gated_delta_rule(q, k, v, rates.log(), rates, backend=backend)
    # S = .5 (3, 4) 2 = (3, 4); then S = .25 (3, 4), of which the key (0, 1) recalls 1: the change
    # is .25 (7 - 1) = 1.5 and S = (.75, 2.5).
    root = math.sqrt(2)
    torch.testing.assert_close(y.flatten(), torch.tensor([7 / root, 5 / root], dtype=F64))
    torch.testing.assert_close(state.flatten(), torch.tensor([0.75, 2.5], dtype=F64))


@both
def test_queries_and_keys_are_divided_by_their_lengths(backend: str) -> None:
    given = drawn(70, state=False)
    divided = {n: given[n] / given[n].norm(dim=-1, keepdim=True) for n in ("q", "k")}
    found = gated_delta_rule(**given, l2_norm=True, backend=backend)
    wanted = gated_delta_rule(**{**given, **divided}, backend=backend)
    torch.testing.assert_close(found.output, wanted.output, rtol=0, atol=1e-4)
    plain = gated_delta_rule(**given, backend=backend)
    assert (plain.output - wanted.output).abs().max() > 1e-2


@both
def test_low_precision_has_a_state_in_float32(backend: str) -> None:
    given = drawn(100, dtype=torch.bfloat16, state=False)
    y, state = gated_delta_rule(**given, l2_norm=True, backend=backend)
    exact, _ = gated_delta_rule(**{n: x.double() for n, x in given.items()}, l2_norm=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


@both
def test_strong_decay_of_a_long_sequence_stays_finite(backend: str) -> None:
    given = drawn(90, dtype=torch.float32)
    given["log_decay"] = (given["log_decay"].detach() - 80).requires_grad_()
    found = gated_delta_rule(**given, backend=backend)
    gradients = torch.autograd.grad(found[0].sum(), list(given.values()))
    assert all(x.isfinite().all() for x in (*found, *gradients))


def test_heads_that_do_not_divide_are_refused() -> None:
    given = drawn(3, state=False)
    given["k"] = given["q"] = torch.zeros(3, 2, 4, 5, dtype=F64)
    with pytest.raises(KernelError, match="6 value heads do not divide over 4 key heads"):
        gated_delta_rule(**given)
    with pytest.raises(KernelError, match="there is no token"):
        gated_delta_rule(**{name: x[:0] for name, x in drawn(3, state=False).items()})


def test_one_token_is_a_step_and_two_are_a_chunk() -> None:
    for length, backend in ((1, "reference"), (2, "torch")):
        assert gated_delta_rule.explain(**drawn(length)).backend == backend
