"""Errors name the nearest valid values, and those are valid."""

import re
from itertools import product

import pytest
from megatron_parallel import LayoutError, ParallelLayout
from megatron_parallel.nearest import divisors, nearest, nearest_divisors, nearest_multiples
from megatron_parallel.pipeline import split_layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (nearest([8, 1, 4], 5), "4 or 8"),
        (nearest([1, 4], 5), "4"),
        (nearest([6, 7], 5), "6"),
        (nearest_multiples(10, 4), "8 or 12"),
        (nearest_multiples(3, 4), "4"),
        (nearest_multiples(0, 4), "4"),
        (nearest_multiples(-5, 4), "4"),
        (nearest_divisors(12, 5), "4 or 6"),
        (nearest_divisors(7, 2), "1 or 7"),
        (nearest_divisors(2, 5), "2"),
    ],
)
def test_values_on_both_sides_are_named(text, expected):
    assert text == expected


def test_all_divisors_are_found_once():
    for whole in range(1, 200):
        assert sorted(divisors(whole)) == [n for n in range(1, whole + 1) if whole % n == 0]


def test_a_split_with_the_layers_that_an_error_names_is_accepted():
    found = 0
    ends = (None, 2, 4)
    for layers, pp, vpp, first, last in product(range(1, 14), (1, 2, 3), (1, 2), ends, ends):
        if vpp > pp:
            continue
        try:
            split_layers(layers, pp, vpp, first=first, last=last)
        except LayoutError as error:
            named = re.search(r"use (\d+)(?: or (\d+))? layers", str(error))
            if named is None:
                assert "leave them out" in str(error)
                continue
            for each in filter(None, named.groups()):
                split_layers(int(each), pp, vpp, first=first, last=last)
                found += 1
    assert found > 50


@pytest.mark.parametrize("ranks", [2, 4, 6, 9, 16])
def test_levels_of_context_parallelism_that_an_error_names_are_accepted(ranks):
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(cp=ranks, hierarchical_cp=(ranks, ranks))
    inner, outer = re.search(r"such as (\d+) (\d+)", str(caught.value)).groups()
    assert ParallelLayout(cp=ranks, hierarchical_cp=(int(inner), int(outer))).cp == ranks
