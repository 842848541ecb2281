"""Comparison of what ranks recorded with one rank: sizes, the first difference, and its ranks."""

import math
from dataclasses import replace

import pytest
import torch
from megatron_train.prove.compare import (
    Deviation,
    Differences,
    compare,
    deviations,
    first_deviation,
    joined,
    relative,
    rerouted,
)
from megatron_train.prove.planting import planting
from megatron_train.prove.record import Outcome, Piece
from torch import Tensor


def whole_pieces(**tensors: Tensor) -> list[Piece]:
    return [(name, (0,) * values.ndim, values) for name, values in tensors.items()]


A, B = torch.arange(4.0, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
STEP = whole_pieces(a=A, b=B)
WHOLE = Outcome([1.0, 0.5], [2.0, 1.0], [STEP, STEP], STEP, {})
RANKS = [
    replace(WHOLE, gradients=[own, own], parameters=own)
    for own in (
        [("a", (0,), A[:2].clone()), ("b", (0, 0), B.clone())],
        [("a", (2,), A[2:].clone()), ("b", (0, 0), B.clone())],
    )
]


def changed(rank: int, step: int, name: str, by: float) -> list[Outcome]:
    """Returns the ranks with another gradient of one rank in one step."""
    gradients = [
        [
            (own, at, values + by * (own == name and number == step))
            for own, at, values in pieces
        ]
        for number, pieces in enumerate(RANKS[rank].gradients)
    ]  # fmt: skip
    found = list(RANKS)
    found[rank] = replace(RANKS[rank], gradients=gradients)
    return found


def test_shards_and_copies_of_one_rank_are_equal() -> None:
    found = compare(RANKS, WHOLE, experts=False)
    assert found.equal and found.rerouted is None
    assert first_deviation(RANKS, WHOLE) is None


def test_the_first_step_parameter_and_rank_are_found() -> None:
    ranks = changed(1, 1, "b", 0.25)
    assert compare(ranks, WHOLE, experts=False).gradient == pytest.approx(0.25)
    assert first_deviation(ranks, WHOLE) == Deviation(2, "gradient", "b", 0.25, (1,))
    both = changed(0, 0, "a", 3e-3)
    assert first_deviation(both, WHOLE) == Deviation(1, "gradient", "a", pytest.approx(1e-3), (0,))


def test_a_difference_of_a_loss_comes_before_that_of_its_gradient() -> None:
    ranks = [replace(rank, losses=[1.0, 0.75]) for rank in changed(1, 1, "b", 0.25)]
    assert first_deviation(ranks, WHOLE) == Deviation(2, "loss", "", 0.25, (0, 1))


def test_a_norm_alone_and_a_parameter_alone_are_found() -> None:
    norm = [replace(RANKS[0], norms=[2.0, 1.5]), RANKS[1]]
    assert first_deviation(norm, WHOLE) == Deviation(2, "norm", "", 0.5, (0,))
    last = [RANKS[0], replace(RANKS[1], parameters=whole_pieces(a=A, b=B + 1))]
    assert first_deviation(last, WHOLE) == Deviation(2, "parameter", "b", 1.0, (1,))


def test_ranks_within_the_limit_are_not_named() -> None:
    parts = [whole_pieces(a=A, b=B + by) for by in (1e-10, 1.0, 0.0)]
    ranks = [replace(WHOLE, parameters=own) for own in parts]
    assert first_deviation(ranks, WHOLE) == Deviation(2, "parameter", "b", 1.0, (1,))


def test_what_is_not_a_number_or_on_no_rank_is_infinitely_wrong() -> None:
    assert not compare(changed(0, 1, "a", math.nan), WHOLE, experts=False).equal
    assert first_deviation(changed(0, 1, "a", math.nan), WHOLE).size == math.inf
    half = joined([RANKS[0].parameters])
    assert deviations(half, {"a": A, "b": B}) == {"a": math.inf, "b": 0.0}
    with pytest.raises(ValueError, match="'c' is not on one rank"):
        deviations(joined([whole_pieces(c=A)]), {"a": A})


def test_gradients_of_a_step_without_loss_are_compared_absolutely() -> None:
    zeros = {"a": torch.zeros(2, dtype=torch.float64)}
    assert relative(joined([whole_pieces(**zeros)]), zeros) == 0
    assert relative(joined([whole_pieces(a=torch.full((2,), 0.5))]), zeros) == 0.5


def test_a_planted_function_is_replaced_until_the_end_of_the_block() -> None:
    class Base:
        def value(self) -> int:
            return 1

    class Derived(Base):
        pass

    def plant(mesh, replace) -> None:
        replace(Derived, "value", lambda self: 2)

    with pytest.raises(KeyError), planting(plant, None):
        assert Derived().value() == 2
        assert Base().value() == 1
        raise KeyError
    assert Derived().value() == 1 and "value" not in vars(Derived)


def test_tokens_with_other_experts_are_counted() -> None:
    experts = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])
    whole = replace(WHOLE, routes={(0, 0, 0): experts, (2, 1, 0): experts})

    def ranks(first: Tensor, second: Tensor) -> list[Outcome]:
        """Returns ranks that hold the slices of a sequence in no order."""
        routes = {(0, 0, 2): first[2:], (2, 1, 0): second[:2]}, {(0, 0, 0): first[:2]}
        return [replace(WHOLE, routes=routes[0]), replace(WHOLE, routes=routes[1])]

    late = {(2, 1, 2): experts[2:]}
    found = [*ranks(experts, experts), replace(WHOLE, routes=late)]
    assert rerouted(found, whole) == 0
    other = experts.clone()
    other[0, 0], other[1], other[3, 1] = 3, torch.tensor([3, 2]), 0  # three tokens, four experts
    assert rerouted([*ranks(other, experts), replace(WHOLE, routes=late)], whole) == 3
    assert rerouted([*ranks(other, other), replace(WHOLE, routes=late)], whole) == 5
    assert rerouted(ranks(experts, experts), whole) == 4  # a slice is missing
    assert rerouted([WHOLE], whole) == 8


@pytest.mark.parametrize("name", ["loss", "norm", "gradient", "parameter"])
def test_a_difference_may_be_the_limit_and_no_larger(name: str) -> None:
    none = Differences(0.0, 0.0, 0.0, 0.0)
    assert replace(none, **{name: 1e-9}).equal
    assert not replace(none, **{name: 1.01e-9}).equal
    assert not replace(none, **{name: math.nan}).equal
    assert replace(none, rerouted=0).equal and not replace(none, rerouted=1).equal


@pytest.mark.parametrize(("by", "found"), [(1e-9, False), (2e-9, True)])
def test_the_first_difference_is_above_the_limit(by: float, found: bool) -> None:
    """Values are 0, so that a difference has no rounding; gradients are relative to 3."""
    zero = Outcome([0.0], [0.0], [whole_pieces(a=torch.zeros(2).double())], [], {})
    whole = replace(zero, parameters=whole_pieces(b=torch.zeros(2).double()))
    for change, what, name in (
        ({"losses": [by]}, "loss", ""),
        ({"norms": [by]}, "norm", ""),
        ({"gradients": [whole_pieces(a=torch.tensor([0.0, by]).double())]}, "gradient", "a"),
        ({"parameters": whole_pieces(b=torch.tensor([by, 0.0]).double())}, "parameter", "b"),
    ):
        ranks = [whole, replace(whole, **change)]
        expected = Deviation(1, what, name, pytest.approx(by), (1,))
        assert first_deviation(ranks, whole) == (expected if found else None)


def test_every_loss_of_a_step_is_compared() -> None:
    whole = replace(WHOLE, losses=[1.0, 2.0, 3.0, 4.0])  # two in each of two steps
    for index in range(4):
        losses = list(whole.losses)
        losses[index] += 0.5
        found = first_deviation([whole, replace(whole, losses=losses)], whole)
        assert found == Deviation(index // 2 + 1, "loss", "", 0.5, (1,))
        assert compare([whole, replace(whole, losses=losses)], whole, experts=False).loss == 0.5


def test_the_number_of_other_parameters_that_differ_is_found() -> None:
    wrong = [whole_pieces(a=A + 3e-3, b=B + 0.5)]
    ranks = [replace(WHOLE, gradients=[STEP, *wrong])]
    assert first_deviation(ranks, WHOLE) == Deviation(2, "gradient", "b", 0.5, (0,), 1)


def test_gradients_that_are_small_beside_all_others_are_relative_to_a_thousandth_of_them() -> None:
    """The rms of 3, 4 and two zeros is 2.5; the largest of the small tensor is 1e-6."""
    whole = {"large": torch.tensor([3.0, 4.0]).double(), "small": torch.zeros(2).double()}
    ours = {**whole, "small": torch.tensor([0.0, 1e-3]).double()}
    assert relative(joined([whole_pieces(**ours)]), whole) == pytest.approx(1e-3 / 2.5e-3)
    ours = {**whole, "large": torch.tensor([3.0, 4.4]).double()}
    assert relative(joined([whole_pieces(**ours)]), whole) == pytest.approx(0.1)
