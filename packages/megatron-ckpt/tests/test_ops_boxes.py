"""The tensors that a box is read from, and rows that are malformed or do not fit."""

import pytest
import torch
from megatron_ckpt import Box, CheckpointError
from megatron_ckpt.ops.arithmetic import BlockScale
from megatron_ckpt.ops.definitions import Concat, InterleaveQKV, Reshape, Transpose
from megatron_ckpt.ops.rows import expand

from .test_ops import CONFIG, numbered, one, there_and_back

QKV = InterleaveQKV(heads=4, groups=2, head_dim=2)  # for a group 4 rows, 2 and 2
PARTS = [(8,), (4,), (4,)]
PAIR = [(3, 2), (3, 2)]


@pytest.mark.parametrize(
    ("op", "shapes", "box", "read"),
    [  # boxes that begin or end where a tensor does
        (Concat(0), PAIR, Box((1, 0), (2, 2)), [0]),
        (Concat(0), PAIR, Box((3, 0), (1, 2)), [1]),
        (Concat(0), PAIR, Box((2, 0), (2, 2)), [0, 1]),
        (QKV, PARTS, Box((0, 1), (2, 3)), [0]),
        (QKV, PARTS, Box((0, 4), (1, 2)), [1]),
        (QKV, PARTS, Box((1, 6), (1, 1)), [2]),
        (QKV, PARTS, Box((0, 3), (1, 4)), [0, 1, 2]),
    ],
    ids=str,
)
def test_a_box_is_read_from_the_tensors_that_it_overlaps(op, shapes, box, read):
    tensors = [numbered(*shape) + 100 * i for i, shape in enumerate(shapes)]
    asked = []

    def get(i, part):
        asked.append(i)
        return tensors[i][part.slices_in(Box((0,) * len(shapes[i]), shapes[i]))]

    found = op.read_box(0, box, shapes, get)
    (whole,) = op.forward(tensors)
    assert torch.equal(found, whole[box.slices_in(Box((0,) * whole.ndim, tuple(whole.shape)))])
    assert asked == read


@pytest.mark.parametrize(
    ("op", "shapes", "box", "part"),
    [
        (Concat(0), PAIR, Box((2, 0), (0, 2)), Box((0, 0), (0, 2))),
        (Reshape((6,), (3, 2)), PAIR[:1], Box((2,), (0,)), Box((0, 0), (0, 0))),
    ],
    ids=str,
)
def test_a_box_without_elements_is_read_without_any(op, shapes, box, part):
    asked = []

    def get(i, part):
        asked.append((i, part))
        return torch.zeros(part.lengths)

    assert op.read_box(0, box, shapes, get).shape == box.lengths
    assert asked == [(0, part)]


@pytest.mark.parametrize(
    ("op", "shapes", "words"),
    [
        (BlockScale(2, 2), [(4, 4), (2, 3)], r"scales have shape .2, 3., expected .2, 2."),
        (Transpose((0, 2)), [(4, 4)], "not a permutation of 2 dims"),
    ],
    ids=str,
)
def test_no_box_is_read_for_tensors_that_do_not_fit(op, shapes, words):
    def get(i, part):
        pytest.fail("nothing should be read")

    with pytest.raises(ValueError, match=words):
        op.read_box(0, Box((0, 0), (1, 1)), shapes, get)


def test_errors_of_a_box_name_the_row_unless_they_name_a_file():
    row, box = one([numbered(2)] * 2, ("tie", {})), Box((0,), (2,))
    meta = [numbered(2).to("meta")] * 2
    with pytest.raises(CheckpointError, match=r"^theirs.0 \+ theirs.1 <-> ours.0: tied tensors di"):
        row.read_box("ours.0", box, meta, lambda i, part: numbered(2) + i)

    def torn(i, part):
        raise CheckpointError("file is torn")

    with pytest.raises(CheckpointError, match=r"^file is torn$"):
        row.read_box("ours.0", box, meta, torn)


def test_a_tensor_without_the_dim_of_an_operation_is_named_with_it():
    row = one(numbered(3), ("concat", {"dim": 1}))
    with pytest.raises(CheckpointError, match=r"^theirs.0 <-> ours.0: Concat.* does not fit \(3,"):
        row.forward([numbered(3)])


def test_three_operations_after_another_are_undone():
    """Queries, keys and values with their rows in the last dim, of two groups."""
    step = ("interleave_qkv", {"heads": 2, "groups": 2, "head_dim": 1})
    parts = [numbered(3, 2) + 10 * i for i in range(3)]
    row = one(parts, ("concat", {"dim": 1}), ("transpose", {}), step)
    assert there_and_back(row, parts)[0].tolist() == [[0, 2, 4], [10, 12, 14], [20, 22, 24]]


@pytest.mark.parametrize(
    "row",
    [
        ([], ["b"], []),
        (3, ["b"], []),
        ("a", ["b"], [("tie", 5)]),
        ("a", ["b"], [], ["if"]),
        ("a", ["b"]),
    ],
    ids=str,
)
def test_rows_of_another_form_are_refused(row):
    with pytest.raises(CheckpointError, match=r"is not \(ours, \[theirs\], \[\(operation, argum"):
        expand([row], CONFIG)


@pytest.mark.parametrize("name", ["a.{j", "a.j}", "a.{i}}", "a.{{i}"])
def test_names_have_no_other_braces(name):
    with pytest.raises(CheckpointError, match=r"has a pattern other than \{i\}"):
        expand([(name, ["b"], [])], CONFIG)


def test_the_tensor_of_two_rows_is_named_among_others():
    rows = [("a", ["b"], []), ("a", ["c"], []), ("z", ["z"], [])]
    with pytest.raises(CheckpointError, match=r"two rows name 'a' \(ours\)"):
        expand(rows, CONFIG)
    with pytest.raises(CheckpointError, match=r"no operation joins its 2 tensors into one$"):
        expand([("a", ["b", "c"], [])], CONFIG)
