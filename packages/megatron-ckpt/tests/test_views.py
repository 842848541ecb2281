import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_ckpt import CheckpointError, View
from megatron_ckpt.views import (
    Box,
    box_of,
    check_tiling,
    cut_dims,
    find_overlap,
    find_uncovered,
    intersect,
    tiles,
)


@st.composite
def boxes(draw, ndim=None, size=6):
    ndim = draw(st.integers(1, 3)) if ndim is None else ndim
    offsets = draw(st.tuples(*[st.integers(0, size - 1)] * ndim))
    return Box(offsets, tuple(draw(st.integers(0, size - o)) for o in offsets))


def cells(box):
    return set(itertools.product(*map(range, box.offsets, box.ends)))


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_intersection_is_the_set_of_common_elements(pair):
    common = intersect(*pair)
    assert cells(pair[0]) & cells(pair[1]) == (cells(common) if common else set())


@given(st.integers(0, 3).flatmap(lambda n: st.lists(boxes(n), max_size=6)))
def test_an_overlap_is_found_exactly_where_two_boxes_share_an_element(held):
    pairs = {(i, j) for i, j in itertools.combinations(range(len(held)), 2)}
    sharing = {(i, j) for i, j in pairs if cells(held[i]) & cells(held[j])}
    found = find_overlap(held)
    assert found in sharing if sharing else found is None


@given(st.integers(0, 3).flatmap(lambda n: st.lists(boxes(n), max_size=6).map(lambda b: (n, b))))
def test_an_uncovered_box_is_found_exactly_if_elements_are_missing(case):
    ndim, held = case
    region = Box((0,) * ndim, (6,) * ndim)
    left = cells(region).difference(*map(cells, held))
    hole = find_uncovered(region, held)
    assert (cells(hole) <= left and cells(hole)) if left else hole is None


@st.composite
def cut_shapes(draw):
    """A shape, and boxes that tile it, of which one may be moved, dropped or repeated."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        (offsets, lengths) = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, lengths[dim]))
        for start, length in ((0, at), (at, lengths[dim] - at)):
            o, n = [*offsets], [*lengths]
            o[dim], n[dim] = offsets[dim] + start, length
            parts.append(Box(tuple(o), tuple(n)))
    kind = draw(st.sampled_from(["whole", "moved", "dropped", "repeated"]))
    chosen = draw(st.integers(0, len(parts) - 1))
    if kind == "dropped":
        del parts[chosen]
    if kind == "repeated":
        parts.append(parts[chosen])
    if kind == "moved":
        parts[chosen] = Box((0,) * len(shape), parts[chosen].lengths)
    return shape, draw(st.permutations(parts))


@given(cut_shapes())
def test_boxes_tile_a_shape_if_each_element_is_in_one(case):
    shape, parts = case
    held = [cell for box in parts for cell in cells(box)]
    assert tiles(shape, parts) == (sorted(held) == sorted(cells(Box((0,) * len(shape), shape))))


def test_many_boxes_of_any_order_are_compared_with_a_shape_quickly():
    count = 4_000  # each overlaps all others along one of the dims
    bars = [Box((0, row), (count, 1)) for row in range(count)]
    assert tiles((count, count), bars)
    assert not tiles((count, count), [*bars[:-1], bars[0]])
    assert not tiles((), []) and tiles((0, 3), []) and tiles((0, 3), [Box((0, 0), (0, 2))])


def test_a_dim_is_cut_if_a_box_with_elements_has_a_part_of_it():
    halves = [Box((0, 0), (4, 2)), Box((0, 2), (4, 1))]
    assert cut_dims((4, 3), halves) == [1] and cut_dims((4, 3), []) == []
    assert cut_dims((4, 3), [Box((0, 0), (4, 3)), Box((1, 0), (0, 3))]) == []


def test_an_overlap_names_the_tensor_the_ranks_and_the_elements():
    owners = [(0, 0, Box((0, 0), (3, 4))), (5, 0, Box((2, 0), (2, 4)))]
    with pytest.raises(CheckpointError, match=r"'w': ranks 0 and 5 both hold \[2:3,0:4\] as repl"):
        check_tiling("w", (4, 4), owners)
    check_tiling("w", (4, 4), [(0, 0, Box((0, 0), (4, 4))), (1, 1, Box((0, 0), (4, 4)))])
    twins = [(0, 0, Box((0,), (4,))), (1, 1, Box((0,), (4,))), (2, 1, Box((3,), (1,)))]
    with pytest.raises(CheckpointError, match=r"ranks 1 and 2 both hold .* as replica 1"):
        check_tiling("w", (4,), twins)


def test_a_gap_names_the_tensor_and_the_box():
    owners = [(0, 0, Box((0, 0), (4, 2))), (1, 0, Box((0, 2), (2, 2)))]
    with pytest.raises(CheckpointError, match=r"'w' of shape \(4, 4\): no rank holds \[2:4,2:4\]"):
        check_tiling("w", (4, 4), owners)
    with pytest.raises(CheckpointError, match="no rank holds"):
        check_tiling("w", (4,), [(0, 1, Box((0,), (4,)))])


def test_a_tensor_cut_along_more_dims_than_a_reader_takes_is_refused():
    def corners(dims):
        """The two halves along each dim in turn, of which each has the rest of the one before."""
        rest, owners = Box((0,) * dims, (2,) * dims), []
        for dim in range(dims):
            offsets, lengths = [*rest.offsets], [*rest.lengths]
            lengths[dim] = 1
            owners.append((dim, 0, Box(tuple(offsets), tuple(lengths))))
            offsets[dim] = 1
            rest = Box(tuple(offsets), tuple(lengths))
        return [*owners, (dims, 0, rest)]

    check_tiling("w", (2,) * 8, corners(8))
    assert tiles((2,) * 8, [box for _, _, box in corners(8)])
    with pytest.raises(CheckpointError, match=r"'w' .* is cut along 9 dims, and at most 8 can be"):
        check_tiling("w", (2,) * 9, corners(9))


def test_a_tensor_cut_over_many_ranks_is_checked_quickly():
    rows = [(rank, 0, Box((0, 3 * rank), (512, 3))) for rank in range(4096)]
    check_tiling("w", (512, 3 * 4096), rows)


def test_scalars_and_empty_tensors_are_covered_by_one_owner_or_none():
    check_tiling("scalar", (), [(0, 0, Box((), ())), (1, 1, Box((), ()))])
    with pytest.raises(CheckpointError, match="both hold"):
        check_tiling("scalar", (), [(0, 0, Box((), ())), (1, 0, Box((), ()))])
    with pytest.raises(CheckpointError, match="no rank"):
        check_tiling("scalar", (), [])
    check_tiling("empty", (0, 3), [])


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (View(torch.ones(2), (4,), (0,), (3,)), r"shape \(2,\) but the lengths are \(3,\)"),
        (View(torch.ones(2), (4,), (3,), (2,)), r"\[3:5\] lies outside the global shape \(4,\)"),
        (View(torch.ones(2), (4,), (-1,), (2,)), "lies outside"),
        (View(torch.ones(2), (4, 1), (0,), (2,)), "number of dims"),
        (View(torch.ones(2), (4,), (0,), (2,), -1), "replica must not be negative, got -1"),
    ],
)
def test_views_that_do_not_fit_are_refused_by_name(view, words):
    with pytest.raises(CheckpointError, match=f"'w'.*{words}"):
        box_of("w", view)


def test_slices_in_select_a_box_from_a_larger_one():
    whole = np.arange(24).reshape(4, 6)
    held, inner = Box((1, 2), (3, 4)), Box((2, 3), (2, 2))
    part = whole[1:4, 2:6][inner.slices_in(held)]
    assert part.tolist() == whole[2:4, 3:5].tolist()
