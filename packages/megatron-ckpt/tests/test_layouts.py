"""Every layout loads what every layout saved."""

import math
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_ckpt import Box, CheckpointStore, View
from megatron_ckpt.store import blocks, manifest, reader

SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float64, torch.bfloat16, torch.uint8, torch.int32])


def split(draw, box, depth):
    """Splits a box in two at a random index, and recursively the parts."""
    dims = [d for d, n in enumerate(box.lengths) if n > 1]
    if depth == 0 or not dims:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.lengths[dim] - 1))
    low, high = list(box.lengths), list(box.lengths)
    low[dim], high[dim] = at, box.lengths[dim] - at
    start = list(box.offsets)
    start[dim] += at
    parts = (Box(box.offsets, tuple(low)), Box(tuple(start), tuple(high)))
    return [piece for part in parts for piece in split(draw, part, depth - 1)]


@st.composite
def layouts(draw, shape, world_size):
    """Returns boxes that tile the shape, each with its rank and possibly a copy on another rank."""
    tiles = split(draw, Box((0,) * len(shape), shape), draw(st.integers(0, 3)))
    ranks = st.integers(0, world_size - 1)
    held = [(draw(ranks), 0, tile) for tile in tiles]
    return held + [(draw(ranks), 1, tile) for tile in tiles if draw(st.booleans())]


@st.composite
def cases(draw):
    shape, (old, new) = draw(SHAPES), draw(st.tuples(*[st.integers(1, 3)] * 2))
    return shape, old, draw(layouts(shape, old)), new, draw(layouts(shape, new)), draw(DTYPES)


def views(layout, rank, shape, content):
    return [
        View(content(box).contiguous(), shape, box.offsets, box.lengths, replica)
        for owner, replica, box in layout
        if owner == rank
    ]


@pytest.mark.parametrize("tiny_blocks", [False, True])
def test_any_layout_loads_from_any_layout(on_ranks, monkeypatch, tiny_blocks):
    if tiny_blocks:
        for module in (blocks, manifest):
            monkeypatch.setattr(module, "BLOCK_SIZE", 256)
        monkeypatch.setattr(reader, "_READ_BYTES", 96)
        monkeypatch.setattr(reader, "_SEEK", 24)

    @settings(max_examples=60, deadline=None)
    @given(cases())
    def check(case):
        shape, old_size, old, new_size, new, dtype = case
        size = math.prod(shape)
        whole = torch.arange(size).mul(7).remainder(251).to(dtype).reshape(shape)
        origin = Box((0,) * len(shape), shape)
        with tempfile.TemporaryDirectory() as folder:

            def save(ranks):
                held = views(old, ranks.rank, shape, lambda box: whole[box.slices_in(origin)])
                return CheckpointStore(folder, ranks).save(1, {"w": held} if held else {})

            def load(ranks):
                held = views(new, ranks.rank, shape, lambda b: torch.zeros(b.lengths, dtype=dtype))
                CheckpointStore(folder, ranks).load(None, {"w": held} if held else {})
                return held

            for result in on_ranks(old_size, save):
                assert not isinstance(result, Exception), result
            for held in on_ranks(new_size, load):
                assert not isinstance(held, Exception), held
                for view in held:
                    part = Box(view.offsets, view.lengths).slices_in(origin)
                    assert torch.equal(view.tensor, whole[part])

    check()
