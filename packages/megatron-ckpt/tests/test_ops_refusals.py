"""Operations, checks and rows at their limits: what just fits, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import CheckpointError
from megatron_ckpt.ops import rows as rows_module
from megatron_ckpt.ops.arithmetic import BlockScale, Tie
from megatron_ckpt.ops.definitions import (
    Concat,
    InterleaveQKV,
    Reshape,
    RopePermute,
    SliceRows,
    Stack,
    Transpose,
)
from megatron_ckpt.ops.ignored import CHECKS, check_ignored
from megatron_ckpt.ops.interleaving import Interleave, Segments
from megatron_ckpt.ops.interpreter import check_source
from megatron_ckpt.ops.rows import expand

from .test_ops import CONFIG, numbered

QKV = InterleaveQKV(heads=4, groups=2, head_dim=2)
FORWARD = [
    (Transpose((0, 2)), [(2, 3)], "not a permutation of 2 dims"),
    (Transpose((1, 1)), [(2, 3)], "not a permutation"),
    (Transpose(), [(2, 3, 4)], "expected 2 dims"),
    (Concat(0), [(2, 3), (3, 3)], r"sizes along dim 0 are \[2, 3\], expected \[2, 2\]"),
    (Concat(0, (2, 2)), [(2, 3), (3, 3)], "expected"),
    (Reshape((6,), (2, 3)), [(3, 2)], "expected"),
    (Reshape((6,), (2, 3)), [(6,)], "expected"),
    (QKV, [(8, 1), (4, 1), (5, 1)], r"rows are \[8, 4, 5\], expected \[8, 4, 4\]"),
    (QKV, [(15, 1)], "expected"),
    (RopePermute(2, 3), [(6, 1)], "an even head_dim"),
    (RopePermute(2, 4), [(9, 1)], "expected 8 rows"),
    (RopePermute(2, 4), [()], "expected 8 rows"),
    (RopePermute(1, 2, only=1), [(2,)], "only=1, but there are 1 tensors"),
    (SliceRows(3), [(2, 1)], "expected 3 rows"),
    (SliceRows(3), [()], "expected 3 rows"),
    (Segments(0, (1, 2)), [(4,)], "is not the sum of"),
    (Interleave(0, 2), [(4,), (3,)], "not 2 blocks of"),
    (Interleave(0, 2, (1, 2)), [(2,), (2,)], "not 2 blocks of"),
    (BlockScale(2, 2), [(4, 4)], "needs a matrix and its scales"),
    (BlockScale(2, 2), [(4,), (2,)], "needs a matrix and its scales"),
    (BlockScale(2, 2), [(4, 4), (2, 3)], "expected"),
    (Tie(), [(2,), (3,)], "tied tensors differ"),
]


@pytest.mark.parametrize(("op", "shapes", "words"), FORWARD, ids=str)
def test_tensors_that_do_not_fit_are_refused(op, shapes, words):
    with pytest.raises(ValueError, match=words):
        op.forward([torch.ones(shape) for shape in shapes])
    with pytest.raises(ValueError, match=words):  # before anything is read
        op.forward([torch.ones(shape, device="meta") for shape in shapes])


INVERSE = [
    (Transpose(), [(2, 3, 4)], 1, "expected 2 dims"),
    (Transpose((0, 2)), [(2, 3)], 1, "not a permutation of 2 dims"),
    (Concat(0), [(5, 1)], 2, "size 5 along dim 0 is not divisible by 2"),
    (Concat(0, (2, 3)), [(6, 1)], 2, "do not split 6 into 2 tensors"),
    (Concat(0, (2, 4)), [(6, 1)], 3, "do not split 6 into 3 tensors"),
    (Reshape((6,), (2, 3)), [(5,)], 1, "expected"),
    (Stack(0), [(3, 2)], 2, "size along dim 0 is not 2"),
    (QKV, [(2, 7, 1)], 1, "expected"),
    (QKV, [(4, 8, 1)], 1, "expected"),
    (RopePermute(2, 4), [(4, 1)], 1, "expected 8 rows"),
    (Segments(0, (1, 2)), [(1,), (1,)], 1, "expected"),
    (Interleave(0, 2, (1, 2)), [(5,)], 2, "not 2 blocks of"),
    (Interleave(0, 2, (1, 2)), [(6,)], 3, "not 2 blocks of"),
]


@pytest.mark.parametrize(("op", "shapes", "count", "words"), INVERSE, ids=str)
def test_our_tensors_that_do_not_fit_are_refused(op, shapes, count, words):
    with pytest.raises(ValueError, match=words):
        op.inverse([torch.ones(shape) for shape in shapes], count)


def test_tied_tensors_have_one_dtype():
    with pytest.raises(ValueError, match="tied tensors differ"):
        Tie().forward([torch.ones(2), torch.ones(2).double()])
    with pytest.raises(ValueError, match="tied tensors differ"):
        Tie().forward([torch.ones(2, device="meta"), torch.ones(2, device="meta").double()])
    assert len(Tie(3).forward([torch.ones(2)])) == Tie(3).num_outputs(1) == 3
    assert len(Tie().forward([torch.ones(2)] * 3)) == Tie().num_outputs(3) == 1


def passes(kind, tensors, **arguments):
    """Returns whether a check accepts the tensor ``x`` of a source."""
    try:
        CHECKS[kind]("x", tensors if isinstance(tensors, dict) else {"x": tensors}, **arguments)
    except CheckpointError as error:
        assert "tensor 'x'" in str(error)
        return False
    return True


def test_a_causal_mask_is_square_and_not_empty():
    mask = torch.ones(3, 3).tril()
    assert passes("causal_mask", mask) and passes("causal_mask", mask.view(1, 1, 3, 3))
    assert passes("causal_mask", torch.ones(1, 1))
    for wrong in (torch.ones(0, 0), torch.ones(9), mask.T, mask[:2], mask.expand(2, 3, 3)):
        assert not passes("causal_mask", wrong.contiguous())
    for flat in (torch.ones(1), torch.ones(2, 8).tril().view(2, 4, 2)):
        assert not passes("causal_mask", flat)


def test_position_ids_count_up_from_0():
    for right in (torch.arange(4), torch.arange(4).view(1, 4), torch.arange(3.0), torch.zeros(0)):
        assert passes("count_up", right)
    for wrong in (torch.arange(1, 4), torch.tensor([0, 1, 3]), torch.tensor([0, 0])):
        assert not passes("count_up", wrong)
    assert passes("not_read", torch.ones(2))


def test_scores_are_masked_by_one_number_of_at_most_the_value():
    for number, fits in ((-1e4, True), (-1e4 - 1, True), (-1e4 + 1, False)):
        assert passes("at_most", torch.tensor(number), value=-1e4) == fits
        assert passes("at_most", torch.tensor([[number]]), value=-1e4) == fits
    assert not passes("at_most", torch.zeros(0), value=1.0)


def test_every_row_of_tied_tensors_is_compared():
    word = torch.arange(9000.0).view(4500, 2)
    for row, rows, fits in (
        *((0, 1, False), (0, 4500, False), (4096, 4500, False)),
        *((4499, 4500, False), (4499, 4499, True)),
    ):
        head = word.clone()
        head[row] += 1
        assert passes("same_as", {"x": head, "y": word}, other="y", rows=rows) == fits
    for rows, fits in ((4500, True), (4501, False)):
        assert passes("same_as", {"x": word, "y": word}, other="y", rows=rows) == fits
    assert not passes("same_as", {"x": word[:, :1], "y": word}, other="y", rows=3)


def test_rotary_frequencies_are_compared_to_the_precision_of_their_dtype():
    turns = 100.0 ** -(torch.arange(0, 8, 2).double() / 8)

    def fits(tensor, dim=8):
        return passes("rotary_frequencies", tensor, base=100.0, dim=dim)

    assert fits(turns.float() * (1 + 5e-6)) and not fits(turns.float() * (1 + 3e-5))
    assert fits(turns.bfloat16() * (1 + 2**-7)) and not fits(turns.bfloat16() * (1 + 2**-5))
    for steps in (2, 3):  # units in the last place of 1
        near = turns.bfloat16()
        near[0] += steps * torch.finfo(torch.bfloat16).eps
        assert fits(near) == (steps == 2)
    assert fits(turns[:1], 2) and not fits(turns[:1].view(1, 1), 2)
    assert not fits(turns.view(2, 2)) and not fits(turns, dim=10) and not fits(turns[:1].long(), 2)


def test_the_first_pattern_that_matches_decides():
    row = SimpleNamespace(theirs=("used",))
    source = {"used": torch.ones(1), "b.0": torch.ones(1), "b.1": torch.zeros(3)}
    first = [("b.0", "not_read", {}), ("b.{i}", "count_up", {})]
    with pytest.raises(CheckpointError, match=r"tensor 'b\.1' does not count up"):
        check_ignored([row], CONFIG, source, first)
    source["b.1"] = torch.arange(3)
    check_ignored([row], CONFIG, source, first)
    check_ignored([row], CONFIG, source, [("used", "no_check", {}), ("c", "no_check", {})])
    with pytest.raises(CheckpointError, match=r"unknown check 'count_pu' \(nearest: 'count_up'\)"):
        check_ignored([row], CONFIG, source, [("b.{i}", "count_pu", {})])


def test_one_tensor_that_is_missing_or_left_over_has_no_others_beside_it():
    row = SimpleNamespace(theirs=("a", "b"), ours=("c",))
    for source, words in (
        (["a"], "the source has no tensor 'b'"),
        ([], "the source has no tensor 'a' and 1 more"),
        (["a", "b", "zzzz"], "no row uses tensor 'zzzz' of the source"),
        (["a", "b", "yyyy", "zzzz"], "no row uses tensor 'yyyy' and 1 more of the source"),
    ):
        with pytest.raises(CheckpointError) as caught:
            check_source([row], source)
        assert str(caught.value) == words
    check_source([row], ["a", "b", "x.3"], ignored=["x.{i}"])
    check_source([row], ["c"], inverse=True)
    with pytest.raises(CheckpointError, match="merge it into the weight"):
        named = SimpleNamespace(theirs=("t",), ours=("l.weight",))
        check_source([named], ["l.weight", "l.lora_a"], inverse=True)


ROW = ("a.{i}", ["b.{i}"], [])


def test_a_thousand_layers_are_expanded_and_more_only_with_as_many_tensors():
    def layers(count, most):
        return len(expand([ROW], {"num_layers": count}, most))

    assert layers(1000, 2) == 1000 and layers(1001, 1001) == 1001 and layers(1001, None) == 1001
    assert layers(0, 2) == 0
    with pytest.raises(CheckpointError, match="has 1001 layers, but the source has only 2 tensors"):
        layers(1001, 2)
    with pytest.raises(CheckpointError, match="has 1002 layers"):
        layers(1002, 1001)


def test_the_names_of_all_rows_are_limited_together(monkeypatch):
    monkeypatch.setattr(rows_module, "_MOST_NAMES", 6)
    stack = [("stack", {"dim": 0})]
    row = ("a.{i}", ["b.{i}", "c.{i}"], stack)
    assert len(expand([row, ("d.{i}", ["d.{i}"], [])], CONFIG)) == 4  # 2 layers of 2 and 1
    with pytest.raises(CheckpointError, match=r"row 'e': .* result in more than 6 tensors"):
        expand([row, ("d.{i}", ["d.{i}"], []), ("e", ["e"], [])], CONFIG)


@pytest.mark.parametrize(
    "step",
    [
        ("reshape", {"shape": [0], "source": [3]}),
        ("reshape", {"shape": [-2], "source": [3]}),
        ("reshape", {"shape": 3, "source": [3]}),
        ("reshape", {"shape": [3], "source": [0]}),
        ("reshape", {"shape": [3], "source": [-2]}),
        ("concat", {"dim": -1}),
        ("concat", {"dim": [0]}),
        ("concat", {"dim": 0, "sizes": [0]}),
        ("rope_permute", {"heads": 1, "head_dim": 2, "only": -1}),
        ("add_constant", {"value": float("nan")}),
        ("add_constant", {"value": float("inf")}),
        ("add_constant", {"value": True}),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(step):
    with pytest.raises(CheckpointError, match="row 'a': "):
        expand([("a", ["b"], [step])], CONFIG)


def test_arguments_at_the_ends_of_their_range_are_allowed():
    steps = [
        ("reshape", {"shape": [-1, 1], "source": [-1]}),
        ("rope_permute", {"heads": 1, "head_dim": 2, "only": 0}),
        ("concat", {"dim": 0, "sizes": [2]}),
        ("add_constant", {"value": 0}),
    ]
    (row,) = expand([("a", ["b"], steps)], CONFIG)
    assert row.forward([numbered(2)])[0].tolist() == [[0.0], [1.0]]


def test_layers_may_have_to_hold_a_property_and_lack_another():
    config = SimpleNamespace(num_layers=3, first=[True, True, False], second=(False, True, False))
    where = {"if": "$first", "unless": "$second"}
    assert [row.ours for row in expand([(*ROW, where)], config)] == [("a.0",)]
    config.first = [1, 1, 0]
    with pytest.raises(CheckpointError, match="is not a boolean, nor a list of 3 booleans"):
        expand([(*ROW, where)], config)
    assert expand([(*ROW, {"from": 2, "to": 9})], config)[0].ours == ("a.2",)
    assert expand([(*ROW, {"from": 3})], config) == []
    assert expand([(*ROW, {"only": []})], config) == []
