"""Rows of a conversion: alternating and fused tensors, scales, experts, and selected layers."""

import json

import jsonschema
import pytest
import torch
from megatron_ckpt import Box, CheckpointError
from megatron_ckpt.ops.rows import expand

from .test_ops import CONFIG, SCHEMA, numbered, one


def test_rows_of_gate_and_up_that_alternate_become_two_of_ours():
    theirs = numbered(6, 1)  # gate 0, up 0, gate 1, ...
    row = one(theirs, ("deinterleave", {"dim": 0, "blocks": 3, "sizes": [1, 1]}), ours=2)
    gate, up = row.forward([theirs])
    assert (gate.flatten().tolist(), up.flatten().tolist()) == ([0, 2, 4], [1, 3, 5])
    assert torch.equal(row.inverse([gate, up])[0], theirs)


def test_a_fused_projection_becomes_two_of_ours_and_two_become_three_of_theirs():
    row = one(numbered(5, 2), ("segments", {"dim": 0, "sizes": ["$heads", 1]}), ours=2)
    queries, rest = row.forward([numbered(5, 2)])
    assert queries.shape == (4, 2) and rest.tolist() == [[8, 9]]
    steps = [("concat", {"dim": 0}), ("segments", {"dim": 0, "sizes": [4, 2]})]
    many = one([numbered(2)] * 3, *steps, ours=2)
    parts = [numbered(2), numbered(2) + 10, numbered(2) + 20]
    assert [part.tolist() for part in many.forward(parts)] == [[0, 1, 10, 11], [20, 21]]
    back = many.inverse(many.forward(parts))
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


def test_a_gain_stored_as_its_distance_from_one():
    row = one(numbered(3), ("add_constant", {"value": 1.0}))
    theirs = torch.tensor([0.5, -0.25, 2**-6], dtype=torch.bfloat16)
    (ours,) = row.forward([theirs])
    assert ours.dtype == torch.bfloat16 and ours.tolist() == [1.5, 0.75, 1 + 2**-6]
    assert torch.equal(row.inverse([ours])[0], theirs)


def test_float8_blocks_are_scaled_and_cannot_be_exported():
    numbers = torch.tensor([[1.0, 2, 4], [8, 16, 0.5], [-1, -2, -4]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 10], [100, 1000]])
    row = one([numbers, scales], ("block_scale", {"rows": 2, "columns": 2}))
    (ours,) = row.forward([numbers, scales])
    assert ours.dtype == torch.float32
    assert ours.tolist() == [[1, 2, 40], [8, 16, 5], [-100, -200, -4000]]
    with pytest.raises(CheckpointError, match=r"\(3, 3\): block_scale has no inverse"):
        row.inverse([ours.to("meta")])  # before anything is written
    with pytest.raises(CheckpointError, match=r"scales have shape .3, 2., expected .2, 2."):
        row.forward([numbers, scales[[0, 1, 1]]])


def test_tied_tensors_that_differ_are_refused():
    row = one([numbered(2)] * 2, ("tie", {}))
    with pytest.raises(CheckpointError, match="tied tensors differ"):
        row.forward([numbered(2), numbered(2) + 1])
    shared = one(numbered(2), ("tie", {"copies": 2}), ours=2)
    assert len(shared.forward([numbered(2)])) == 2
    with pytest.raises(CheckpointError, match="tied tensors differ"):
        shared.inverse([numbered(2), numbered(2) + 1])


def test_one_expert_reads_only_its_own_rows():
    steps = [
        ("stack", {"dim": 0}),
        ("reshape", {"shape": [3, 2, 4, 5], "source": [-1, 4, 5]}),
    ]
    row, asked = one([numbered(4, 5)] * 6, *steps), []

    def get(i, box):
        asked.append((i, box))
        return numbered(4, 5)[box.slices_in(Box((0, 0), (4, 5)))] + 100 * i

    box = Box((1, 0, 2, 0), (1, 2, 2, 5))
    made = row.read_box("ours.0", box, [torch.empty(4, 5, device="meta")] * 6, get)
    assert asked == [(2, Box((2, 0), (2, 5))), (3, Box((2, 0), (2, 5)))]
    assert made[0, :, 0, 0].tolist() == [210, 310]


@pytest.mark.parametrize(("shape", "source"), [([1, 1], []), ([], [1, 1]), ([1], []), ([], [])])
def test_a_single_number_may_gain_and_lose_dims(shape, source):
    theirs = torch.full(source, 7.0)
    row, asked = one(theirs, ("reshape", {"shape": shape, "source": source})), []
    (ours,) = row.forward([theirs])
    assert ours.shape == tuple(shape) and row.inverse([ours])[0].shape == tuple(source)

    def get(i, box):
        asked.append((i, box))
        return theirs

    whole = Box((0,) * len(shape), tuple(shape))
    assert torch.equal(row.read_box("ours.0", whole, [theirs.to("meta")], get), ours)
    assert asked == [(0, Box((0,) * len(source), tuple(source)))]


WHERE = {
    (): [0, 1],
    ("count", "$depth"): [0, 1, 2, 3, 4],
    ("count", "$depth", "from", 1, "every", 2): [1, 3],
    ("count", "$depth", "from", 1, "to", 3): [1, 2],
    ("count", "$depth", "to", "$heads"): [0, 1, 2, 3],
    ("count", "$depth", "only", (4, 0)): [4, 0],
    ("count", "$depth", "if", "$sparse"): [1, 2, 4],
    ("count", "$depth", "unless", "$sparse"): [0, 3],
    ("count", "$depth", "every", 2, "if", "$sparse"): [2, 4],
    ("if", "$tied"): [0, 1],
    ("unless", "$tied"): [],
}


@pytest.mark.parametrize("words", WHERE)
def test_rows_apply_to_the_selected_layers(words):
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    where = {key: list(value) if key == "only" else value for key, value in pairs.items()}
    row = ("encoder.{i}.w", ["enc.{i}.w"], [], where)
    jsonschema.validate(json.loads(json.dumps([row])), SCHEMA)
    made = expand([row], CONFIG)
    assert [each.theirs for each in made] == [(f"enc.{i}.w",) for i in WHERE[words]]
    assert [each.ours for each in made] == [(f"encoder.{i}.w",) for i in WHERE[words]]


def test_rows_for_missing_layers_are_refused():
    for where, words in (
        ({"only": [0, 2]}, "no layer 2 of 2"),
        ({"if": "$sparse"}, r"if '\$sparse' is not a boolean, nor a list of 2"),
        ({"if": "$heads"}, "is not a boolean"),
        ({"if": "$sprase"}, "nearest: 'sparse'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            expand([("a.{i}", ["b.{i}"], [], where)], CONFIG)
    with pytest.raises(CheckpointError, match=r"'every' needs \{i\} in its names"):
        expand([("a", ["b"], [], {"every": 2})], CONFIG)
    assert expand([("a", ["b"], [], {"unless": "$tied"})], CONFIG) == []
    with pytest.raises(CheckpointError, match="turn 1 tensors into 2, not 3 of ours"):
        steps = [("segments", {"dim": 0, "sizes": [1, 1]})]
        expand([(["a", "b", "c"], ["d"], steps)], CONFIG)
