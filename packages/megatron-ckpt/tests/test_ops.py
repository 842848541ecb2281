import json
from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_ckpt import Box, CheckpointError, apply_rows
from megatron_ckpt.ops.definitions import OPS
from megatron_ckpt.ops.ignored import CHECKS
from megatron_ckpt.ops.rows import Row, expand

SCHEMA = json.loads(files("megatron_ckpt.ops").joinpath("schema.json").read_text())
CONFIG = SimpleNamespace(
    num_layers=2,
    heads=4,
    groups=2,
    head_dim=2,
    vocab=5,
    hidden=3,
    tied=True,
    depth=5,
    sparse=(False, True, True, False, True),
)


def numbered(*shape):
    """Returns a tensor whose elements all differ."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def one(theirs, *ops, ours=1):
    """Returns a row of one or several tensors of theirs and ours."""
    count = len(theirs) if isinstance(theirs, list) else 1
    names = [f"ours.{i}" for i in range(ours)]
    return expand([(names, [f"theirs.{i}" for i in range(count)], ops)], CONFIG)[0]


def there_and_back(row, tensors):
    (ours,) = row.forward(tensors)
    back = row.inverse([ours])
    assert len(back) == len(tensors)
    for before, after in zip(tensors, back, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)
    return ours


sizes = st.integers(1, 4)


@st.composite
def cases(draw):
    """Returns an operation with tensors that fit it."""
    name = draw(st.sampled_from(sorted(OPS)))
    if name == "transpose" and draw(st.booleans()):
        dims = draw(st.permutations(range(3)))
        return (name, {"dims": dims}), [numbered(draw(sizes), draw(sizes), draw(sizes))]
    if name == "transpose":
        return (name, {}), [numbered(draw(sizes), draw(sizes))]
    if name in ("concat", "stack"):
        shape = draw(st.lists(sizes, min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - (name == "concat")))
        count = draw(st.integers(1, 3))
        if name == "stack" or draw(st.booleans()):
            return (name, {"dim": dim}), [numbered(*shape) + 100 * i for i in range(count)]
        extents = draw(st.lists(sizes, min_size=count, max_size=count))
        shapes = [[*shape[:dim], n, *shape[dim + 1 :]] for n in extents]
        tensors = [numbered(*shape) + 100 * i for i, shape in enumerate(shapes)]
        return (name, {"dim": dim, "sizes": extents}), tensors
    if name == "reshape":
        a, b, c = draw(st.tuples(sizes, sizes, sizes))
        return (name, {"shape": [-1, c], "source": [a, b, c]}), [numbered(a, b, c)]
    if name == "interleave_qkv":
        groups, per, d = draw(st.tuples(sizes, sizes, sizes))
        rest = draw(st.lists(sizes, max_size=1))
        parts = draw(sizes)
        rows = [parts * groups * per * d, groups * d, groups * d]
        tensors = [numbered(n, *rest) + 1000 * i for i, n in enumerate(rows)]
        arguments = {"heads": groups * per, "groups": groups, "head_dim": d}
        if parts > 1:
            arguments["parts"] = parts
        return (name, arguments), tensors if draw(st.booleans()) else [torch.cat(tensors)]
    if name == "rope_permute":
        heads, half = draw(st.tuples(sizes, sizes))
        rest = draw(st.lists(sizes, max_size=1))
        return (name, {"heads": heads, "head_dim": 2 * half}), [numbered(heads * 2 * half, *rest)]
    if name == "slice_rows":
        rows = draw(sizes)
        return (name, {"rows": rows}), [numbered(rows, draw(sizes))]
    if name in ("segments", "interleave", "deinterleave"):
        return draw(in_parts(name))
    if name == "add_constant":
        return (name, {"value": 1}), [numbered(draw(sizes), draw(sizes))]
    if name == "tie":
        tensor, count = numbered(draw(sizes), draw(sizes)), draw(sizes)
        return draw(
            st.sampled_from([((name, {}), [tensor] * count), ((name, {"copies": count}), [tensor])])
        )
    (m, n), (rows, columns) = draw(st.tuples(sizes, sizes)), draw(st.tuples(sizes, sizes))
    scales = numbered(-(-m // rows), -(-n // columns)) + 2
    return (name, {"rows": rows, "columns": columns}), [numbered(m, n), scales]


@st.composite
def in_parts(draw, name):
    shape = draw(st.lists(sizes, min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    extents = draw(st.lists(sizes, min_size=1, max_size=3))
    blocks = 1 if name == "segments" else draw(sizes)
    tensors = []
    for i, extent in enumerate(extents):
        shape[dim] = extent * blocks
        tensors.append(numbered(*shape) + 100 * i)
    arguments = {"dim": dim, "sizes": extents}
    if name != "segments":
        arguments["blocks"] = blocks
    if name == "interleave":
        if len(set(extents)) == 1 and draw(st.booleans()):
            del arguments["sizes"]
        return (name, arguments), tensors
    shape[dim] = sum(extents) * blocks
    return (name, arguments), [numbered(*shape)]


def row_of(case):
    (name, arguments), tensors = case
    made = {"segments", "deinterleave"} & {name}
    ours = len(arguments["sizes"]) if made else arguments.get("copies", 1)
    return one(tensors, (name, arguments), ours=ours)


@given(cases())
def test_every_operation_is_undone_by_its_inverse(case):
    row, ((name, _), tensors) = row_of(case), case
    ours = row.forward(tensors)
    if name == "block_scale":
        with pytest.raises(CheckpointError, match="block_scale has no inverse"):
            row.inverse(ours)
        return
    back = row.inverse(ours)
    assert len(back) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))


def require_box(case, at, box):
    """Requires that the shard rule of an output reads a box of it, from no more than it needs."""
    row, (_, tensors) = row_of(case), case
    whole = row.forward(tensors)[at]
    read = dict.fromkeys(range(len(tensors)), 0)

    def get(i, part):
        inside = zip(part.offsets, part.ends, tensors[i].shape, strict=True)
        assert all(0 <= o <= e <= extent for o, e, extent in inside)
        read[i] += part.numel
        return tensors[i][part.slices_in(Box((0,) * tensors[i].ndim, tuple(tensors[i].shape)))]

    found = row.read_box(row.ours[at], box, [tensor.to("meta") for tensor in tensors], get)
    assert torch.equal(found, whole[box.slices_in(Box((0,) * whole.ndim, tuple(whole.shape)))])
    assert all(count <= tensors[i].numel() for i, count in read.items())


@given(cases(), st.data())
def test_a_box_read_by_the_shard_rule_is_that_box_of_the_whole(case, data):
    row, (_, tensors) = row_of(case), case
    at = data.draw(st.integers(0, len(row.ours) - 1))
    whole = row.forward(tensors)[at]
    offsets = [data.draw(st.integers(0, extent - 1)) for extent in whole.shape]
    pairs = zip(offsets, whole.shape, strict=True)
    lengths = [data.draw(st.integers(1, extent - offset)) for offset, extent in pairs]
    require_box(case, at, Box(tuple(offsets), tuple(lengths)))


QKV = ("interleave_qkv", {"heads": 6, "groups": 3, "head_dim": 2, "parts": 2})
SPLIT = [numbered(24, 2), numbered(6, 2) + 100, numbered(6, 2) + 200]
PAIR = [numbered(6, 2), numbered(4, 2) + 50]
BLOCKS = {"dim": 0, "blocks": 2, "sizes": [3, 2]}
INNER = {  # outputs, and boxes that begin and end inside of what an operation moves
    "queries": (QKV, SPLIT, 0, Box((1, 3, 1), (1, 4, 1))),
    "values": (QKV, SPLIT, 0, Box((1, 9, 0), (2, 3, 2))),
    "fused": (QKV, [torch.cat(SPLIT)], 0, Box((2, 1, 1), (1, 10, 1))),
    "rotary": (
        ("rope_permute", {"heads": 3, "head_dim": 4}),
        [numbered(12, 2)],
        0,
        Box((5, 1), (4, 1)),
    ),
    "concat": (("concat", {"dim": 0, "sizes": [6, 4]}), PAIR, 0, Box((5, 1), (3, 1))),
    "stack": (
        ("stack", {"dim": 1}),
        [numbered(3, 2) + 9 * i for i in range(3)],
        0,
        Box((1, 1, 1), (2, 2, 1)),
    ),
    "interleave": (("interleave", BLOCKS), PAIR, 0, Box((4, 1), (4, 1))),
    "deinterleave": (("deinterleave", BLOCKS), [numbered(10, 2)], 1, Box((1, 1), (2, 1))),
    "segments": (
        ("segments", {"dim": 0, "sizes": [3, 4]}),
        [numbered(7, 2)],
        1,
        Box((1, 1), (2, 1)),
    ),
    "scales": (
        ("block_scale", {"rows": 2, "columns": 3}),
        [numbered(7, 8), numbered(4, 3) + 1],
        0,
        Box((3, 4), (3, 3)),
    ),
    "transpose": (
        ("transpose", {"dims": [2, 0, 1]}),
        [numbered(2, 3, 4)],
        0,
        Box((1, 1, 1), (2, 1, 2)),
    ),
}


@pytest.mark.parametrize("name", INNER)
def test_a_box_inside_of_several_blocks_is_that_box_of_the_whole(name):
    step, tensors, at, box = INNER[name]
    require_box((step, tensors), at, box)


@given(cases(), st.sampled_from([torch.bfloat16, torch.float64, torch.int32]))
def test_operations_need_no_content_and_keep_the_dtype(case, dtype):
    row, (_, tensors) = row_of(case), case
    typed = [tensor.to(dtype) for tensor in tensors]
    planned = row.forward([tensor.to("meta") for tensor in typed])
    made = row.forward(typed)
    assert [(p.shape, p.dtype) for p in planned] == [(m.shape, m.dtype) for m in made]
    assert all(tensor.dtype == dtype for tensor in made)


def test_gates_of_heads_follow_the_queries_of_their_group_by_hand():
    # 4 heads, 2 groups, head size 1: theirs is q0 g0 q1 g1 q2 g2 q3 g3.
    theirs = [torch.arange(8.0), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])]
    step = ("interleave_qkv", {"heads": 4, "groups": 2, "head_dim": 1, "parts": 2})
    ours = there_and_back(one(theirs, step), theirs)
    assert ours.tolist() == [[0, 2, 1, 3, 10, 20], [4, 6, 5, 7, 11, 21]]


def test_gpt2_rows_transposed_and_interleaved_by_hand():
    # 2 heads, 2 groups, head size 1: theirs [h, 3h] has columns q0 q1 k0 k1 v0 v1.
    theirs = torch.tensor([[0.0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]])
    step = ("interleave_qkv", {"heads": 2, "groups": 2, "head_dim": 1})
    ours = there_and_back(one(theirs, ("transpose", {}), step), [theirs])
    assert ours.tolist() == [[[0, 10], [2, 12], [4, 14]], [[1, 11], [3, 13], [5, 15]]]


def test_grouped_queries_by_hand():
    step = ("interleave_qkv", {"heads": "$heads", "groups": "$groups", "head_dim": 1})
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    ours = there_and_back(one([q, k, v], step), [q, k, v])
    assert ours.tolist() == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_rotary_pairs_become_halves_by_hand():
    step = ("rope_permute", {"heads": 2, "head_dim": 4})
    theirs = torch.tensor([0.0, 1, 2, 3, 10, 11, 12, 13])
    ours = there_and_back(one(theirs, step), [theirs])
    assert ours.tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


def test_permuting_queries_and_keys_of_different_heads_only():
    steps = [
        ("rope_permute", {"heads": 2, "head_dim": 4, "only": 0}),
        ("rope_permute", {"heads": 1, "head_dim": 4, "only": 1}),
        ("interleave_qkv", {"heads": 2, "groups": 1, "head_dim": 4}),
    ]
    q, k, v = numbered(8), numbered(4) + 20, numbered(4) + 30
    ours = there_and_back(one([q, k, v], *steps), [q, k, v])
    assert ours[0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 20, 22, 21, 23, 30, 31, 32, 33]


def test_padding_rows_are_dropped_and_not_restored():
    row = one(numbered(8, 2), ("slice_rows", {"rows": "$vocab"}))
    (ours,) = row.forward([numbered(8, 2)])
    assert torch.equal(ours, numbered(5, 2))
    assert torch.equal(row.inverse([ours])[0], numbered(5, 2))


ROWS = [
    ("embedding", ["wte"], [("slice_rows", {"rows": "$vocab"})]),
    ("layers.{i}.up", ["h.{i}.gate", "h.{i}.up"], [("stack", {"dim": 0})]),
    ("layers.{i}.out", ["h.{i}.proj"], [("transpose", {})]),
]


def theirs():
    tensors = {"wte": numbered(5, 3)}
    for i in range(2):
        for at, name in enumerate(("gate", "up", "proj")):
            tensors[f"h.{i}.{name}"] = numbered(4, 3) + 100 * i + 1000 * at
    return tensors


def test_a_whole_model_round_trips_one_row_at_a_time():
    asked = []

    class Recorded(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    stream = apply_rows(ROWS, CONFIG, Recorded(theirs()))
    name, first = next(stream)
    assert (name, asked) == ("embedding", ["wte"])
    ours = {name: first, **dict(stream)}
    assert list(ours) == [
        "embedding",
        "layers.0.up",
        "layers.1.up",
        "layers.0.out",
        "layers.1.out",
    ]
    assert ours["layers.1.up"].shape == (2, 4, 3)
    assert torch.equal(ours["layers.1.up"][0], theirs()["h.1.gate"])
    back = dict(apply_rows(ROWS, vars(CONFIG), ours, inverse=True))  # fields may be keys
    assert sorted(back) == sorted(theirs())
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs().items())


def test_missing_and_unused_tensors_are_named_with_the_nearest_before_anything_is_made():
    source = theirs()
    source["h.0.porj"] = source.pop("h.0.proj")
    with pytest.raises(CheckpointError, match=r"no tensor 'h.0.proj' \(nearest: 'h.0.porj'\)"):
        next(apply_rows(ROWS, CONFIG, source))
    source = theirs() | {"h.1.proj_bias": torch.ones(1), "x": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"uses tensor 'h.1.proj_bias' and 1 more .*'h.1.pr"):
        next(apply_rows(ROWS, CONFIG, source))
    ignored = [(name, "at_most", {"value": 1.0}) for name in ("h.{i}.proj_bias", "x")]
    assert next(apply_rows(ROWS, CONFIG, source, ignored=ignored))
    source["x"] += 1
    with pytest.raises(CheckpointError, match="tensor 'x' must be one number of at most 1"):
        next(apply_rows(ROWS, CONFIG, source, ignored=ignored))
    with pytest.raises(CheckpointError, match="no tensor 'embedding' and 4 more"):
        next(apply_rows(ROWS, CONFIG, {}, inverse=True))


def test_rotary_frequencies_below_the_normal_numbers_of_float16_are_equal():
    frequencies = 1e6 ** -(torch.arange(0, 128, 2).double() / 128)
    check = partial(CHECKS["rotary_frequencies"], base=1e6, dim=128)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        check("inv_freq", {"inv_freq": frequencies.to(dtype)})
    wrong = frequencies.half()
    wrong[-1] += 2e-7
    with pytest.raises(CheckpointError, match="differs from the rotary frequencies"):
        check("inv_freq", {"inv_freq": wrong})


def test_a_tensor_of_another_shape_is_named_with_the_row_and_the_operation():
    source = theirs() | {"h.1.up": numbered(7, 3)}
    with pytest.raises(CheckpointError, match=r"h.1.gate \+ h.1.up <-> layers.1.up: Stack.*\(7, 3"):
        list(apply_rows(ROWS, CONFIG, source))


BAD = {
    "unknown operation 'transpos'.*nearest: 'transpose'": ("a", ["b"], [("transpos", {})]),
    "stack has no argument 'dmi'.*nearest: 'dim'": ("a", ["b"], [("stack", {"dmi": 0})]),
    "stack needs the argument 'dim'": ("a", ["b"], [("stack", {})]),
    r"no field '\$head'.*nearest: 'heads'": ("a", ["b"], [("slice_rows", {"rows": "$head"})]),
    "no field 'heads'": ("a", ["b"], [("slice_rows", {"rows": "heads"})]),
    "'0' is not|0 is not an integer of at least 1": ("a", ["b"], [("slice_rows", {"rows": 0})]),
    "1.5 is not an integer": ("a", ["b"], [("slice_rows", {"rows": 1.5})]),
    "True is not an integer": ("a", ["b"], [("slice_rows", {"rows": True})]),
    "needs a list for 'shape'": ("a", ["b"], [("reshape", {"shape": 3, "source": [3]})]),
    "needs the argument 'source'": ("a", ["b"], [("reshape", {"shape": [3]})]),
    "a pattern other than": ("a.{j}", ["b.{j}"], []),
    "needs a list for 'dims'": ("a", ["b"], [("transpose", {"dims": 1})]),
    "'1' is not a number": ("a", ["b"], [("add_constant", {"value": "1"})]),
    "unknown key 'evry'.*nearest: 'every'": ("a.{i}", ["b.{i}"], [], {"evry": 2}),
    "0 is not an integer of at least 1": ("a.{i}", ["b.{i}"], [], {"every": 0}),
    "'only' excludes": ("a.{i}", ["b.{i}"], [], {"only": [0], "from": 1}),
    "'only' needs a list": ("a.{i}", ["b.{i}"], [], {"only": "$heads"}),
    "if True is not a boolean": ("a", ["b"], [], {"if": True}),
    "is not \\(ours": ("a", "b", []),
    "is not \\(ours, ": ("a", [], []),
    "is not \\(ours, \\[": ("a", ["b"], ["transpose"]),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_rows_are_refused_and_the_schema_refuses_them_too(words):
    with pytest.raises(CheckpointError, match=words):
        expand([BAD[words]], CONFIG)
    if "head'" not in words:  # a schema cannot check whether a field exists
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(json.dumps([BAD[words]])), SCHEMA)


def test_rows_that_do_not_fit_together_are_refused():
    with pytest.raises(CheckpointError, match="no operation joins its 2 tensors"):
        expand([("a", ["b", "c"], [])], CONFIG)
    with pytest.raises(CheckpointError, match=r"only some of its names have"):
        expand([("a.{i}", ["b"], [])], CONFIG)
    with pytest.raises(CheckpointError, match="two rows name 'a' \\(ours\\)"):
        expand([("a", ["b"], []), ("a", ["c"], [])], CONFIG)
    with pytest.raises(CheckpointError, match="two rows name 'b' \\(theirs\\)"):
        expand([("a", ["b"], []), ("c", ["b"], [])], CONFIG)


def test_the_schema_is_valid_and_accepts_the_rows_of_the_interpreter():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    rows = [
        *ROWS,
        ("q", ["q"], [("rope_permute", {"heads": "$heads", "head_dim": 2, "only": 0})]),
        ("r", ["r"], [("reshape", {"shape": [-1, "$hidden"], "source": [2, -1, 3]})]),
        ("s", ["s", "t"], [("concat", {"dim": 0, "sizes": ["$heads", 1]})]),
        ("i", ["i"], [("interleave_qkv", {"heads": 4, "groups": "$groups", "head_dim": 1})]),
    ]
    jsonschema.validate(json.loads(json.dumps(rows)), SCHEMA)
    assert all(isinstance(row, Row) for row in expand(rows, CONFIG))


def test_the_schema_lists_exactly_the_operations_and_their_arguments():
    import dataclasses

    steps = [ref["$ref"].rpartition("/")[2] for ref in SCHEMA["$defs"]["step"]["oneOf"]]
    assert sorted(steps) == sorted(OPS)
    for name, kind in OPS.items():
        described = SCHEMA["$defs"][name]["prefixItems"][1]
        fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(kind)}
        assert set(described.get("properties", {})) == set(fields)
        assert set(described.get("required", [])) == {f for f, needed in fields.items() if needed}
