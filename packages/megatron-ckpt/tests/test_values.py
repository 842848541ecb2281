import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_ckpt import CheckpointError
from megatron_ckpt.values import dumps, loads

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
KEYS = st.text(max_size=5) | st.integers() | st.sampled_from(["$bytes", "$dict", "$"])
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def typed(value):
    """Returns the value with its types, so that 1, 1.0 and True differ, as do list and tuple."""
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(item) for item in value]
    if isinstance(value, dict):
        return [(typed(key), typed(item)) for key, item in value.items()]
    return type(value).__name__, value, math.copysign(1, value) if value == 0.0 else 0


@given(PLAIN)
def test_values_round_trip(value):
    assert typed(loads(dumps(value, "x"))) == typed(value)


def test_ordinary_values_are_ordinary_json():
    value = {"step": 3, "rate": 0.1, "name": "Ä", "flags": [True, None]}
    assert json.loads(dumps(value, "x")) == value


@pytest.mark.parametrize(
    "value",
    [{"$bytes": "YQ=="}, {"$float": "nan"}, {"$": 1, "a": 2}, {1: 2, "a": 3}, {"$tuple": []}],
)
def test_keys_that_look_like_marks_are_restored_as_keys(value):
    assert loads(dumps(value, "x")) == value


def test_texts_are_written_as_they_are_and_deep_ones_refused():
    assert dumps("\u00c4", "x") == '"\u00c4"'
    with pytest.raises(CheckpointError, match=r"^stored values (are nested too deeply|cannot)"):
        loads("[" * 100_000)


def test_non_finite_floats_and_bytes_round_trip():
    nan, inf, data = loads(dumps([math.nan, -math.inf, b"\0\xff"], "x"))
    assert math.isnan(nan) and inf == -math.inf and data == b"\0\xff"


@pytest.mark.parametrize("value", [torch.ones(2), {1, 2}, np.arange(2), object()])
def test_other_types_are_refused_with_their_path(value):
    with pytest.raises(
        CheckpointError, match=rf"'sched.groups\[1\]' has type {type(value).__name__}"
    ):
        dumps({"groups": [0, value]}, "sched")
