"""Which dims are summed, how sums are cut, and over which ranks they add up."""

from typing import Any

import pytest
import torch
from megatron_optim.sums import Sums, slice_of, summed_dims, summed_sharding
from megatron_parallel import Axis, Mesh, ParallelLayout, Sharding
from megatron_parallel.sharding import Box, Region
from torch import Tensor


@pytest.mark.parametrize(
    ("sharding", "columns", "rows", "every"),
    [
        (Sharding((4, 6)), (1,), (0,), (0, 1)),
        (Sharding((4, 5, 6)), (2,), (0, 1), (0, 1, 2)),
        (Sharding((5,)), (0,), (), (0,)),
        (Sharding(()), (), (), ()),
        (Sharding((2, 8, 6), fused_dim=0), (2,), (1,), (1, 2)),
        (Sharding((8, 2), fused_dim=1), (), (0,), (0,)),
        (Sharding((3, 8, 6), experts=True), (2,), (1,), (1, 2)),
        (Sharding((3, 2, 8, 6), experts=True, fused_dim=1), (3,), (2,), (2, 3)),
    ],
)
def test_dims_that_enumerate_matrices_are_not_summed(
    sharding: Sharding, columns: tuple[int, ...], rows: tuple[int, ...], every: tuple[int, ...]
) -> None:
    assert summed_dims(sharding, "columns") == columns
    assert summed_dims(sharding, "rows") == rows
    assert summed_dims(sharding, "all") == every


@pytest.mark.parametrize(
    ("sharding", "over", "cut"),
    [
        (Sharding((4, 6), "tp", 0), "columns", {"shape": (4,), "axis": "tp", "dim": 0}),
        (Sharding((4, 6), "tp", 0), "rows", {"shape": (6,)}),
        (Sharding((4, 6), "tp", 0), "all", {"shape": ()}),
        (
            Sharding((5, 6), "tp", 0, padded=8),
            "columns",
            {"shape": (5,), "axis": "tp", "dim": 0, "padded": 8},
        ),
        (Sharding((5, 6), "tp", 0, padded=8), "rows", {"shape": (6,)}),
        (
            Sharding((2, 8, 6), "tp", 2, fused_dim=0),
            "rows",
            {"shape": (2, 6), "axis": "tp", "dim": 1, "fused_dim": 0},
        ),
        (
            Sharding((4, 6, 5), "tp", 0, spill_dim=1),
            "columns",
            {"shape": (4, 6), "axis": "tp", "dim": 0, "spill_dim": 1},
        ),
        (
            Sharding((4, 5, 6), "tp", 0, spill_dim=2),
            "columns",
            {"shape": (4, 5), "axis": "tp", "dim": 0},
        ),
        (Sharding((4, 5, 6), "tp", 0, spill_dim=2), "rows", {"shape": (6,)}),
    ],
)
def test_sums_are_cut_as_their_dims_and_are_neither_matrices_nor_decay(
    sharding: Sharding, over: Any, cut: dict[str, Any]
) -> None:
    assert summed_sharding(sharding, over) == Sharding(**cut, vector=True)


def test_a_box_has_its_part_of_what_is_not_summed() -> None:
    box = Box((1, 2), (2, 3))
    rows, columns = torch.arange(4).view(4, 1), torch.arange(6).view(1, 6)
    assert slice_of(rows, box).tolist() == [[1], [2]]
    assert slice_of(columns, box).tolist() == [[2, 3, 4]]


def test_squares_of_all_pieces_are_added() -> None:
    table = {name: Sharding(shape) for name, shape in (("b", (2, 3)), ("a", (2,)), ("c", (4,)))}
    boxes = Box((0, 2), (1, 1)), Box((1, 0), (1, 3))
    regions = {"b": Region(None, boxes), "c": Region(None, ())}
    sums = Sums(["c", "b", "a"], table, Mesh.single(), regions, torch.float64)
    assert (sums.names, sums.local_names) == (("a", "b", "c"), ("a", "b"))
    shards = [torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 1.0, 2.0, 4.0]).double()]
    pieces = sums.pieces(shards)
    assert [(name, box) for name, _, box in pieces] == [
        ("a", Box((0,), (2,))),
        *(("b", box) for box in boxes),
    ]
    columns, rows = sums.total(pieces, "columns"), sums.total(pieces, "rows")
    assert columns["a"].tolist() == [5.0] and columns["b"].tolist() == [[9.0], [21.0]]
    assert rows["a"].tolist() == [1.0, 4.0] and rows["b"].tolist() == [[1.0, 4.0, 25.0]]
    assert sums.total(pieces, "all")["b"].tolist() == [[30.0]]
    assert [sums.count("b", over) for over in ("columns", "rows", "all")] == [3, 2, 6]
    assert (sums.count("a", "rows"), rows["c"].tolist()) == (1, [0.0] * 4)


def test_sums_add_up_over_the_ranks_that_cut_what_is_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if all ranks had the same sums, those of an axis are multiplied by its size."""
    axes: list[str] = []

    def all_reduce(tensor: Tensor, axis: Axis, *, purpose: str) -> None:
        axes.append(axis.name)
        tensor.mul_(axis.size)

    monkeypatch.setattr("megatron_optim.sums.all_reduce", all_reduce)
    mesh = Mesh(ParallelLayout(tp=2, dp=3), 0)
    table = {
        "column": Sharding((8, 6), "tp", 0),
        "row": Sharding((6, 8), "tp", 1),
        "second": Sharding((3, 4), "tp", 1),
        "whole": Sharding((5, 2)),
    }
    regions = {"row": Region(mesh.axis("dp"), (Box((0, 0), (6, 4)),))}
    sums = Sums(table, table, mesh, regions, torch.float64)
    shapes = {"column": (4, 6), "row": (6, 4), "second": (3, 2), "whole": (5, 2)}
    shards = [torch.full(shapes[name], number + 1.0) for number, name in enumerate(sums.names)]
    found = sums.total(sums.pieces([shard.double() for shard in shards]), "columns")
    expected = {"column": 6 * 1, "row": 2 * 3 * 4 * 4, "second": 2 * 2 * 9, "whole": 2 * 16}
    assert {name: set(each.flatten().tolist()) for name, each in found.items()} == {
        name: {value} for name, value in expected.items()
    }
    assert axes == ["dp", "tp"]
    found = sums.total_over_tensor_ranks({name: torch.ones(1) for name in table}, "rows")
    assert {name: each.item() for name, each in found.items()} == {
        **dict.fromkeys(table, 1.0),
        "column": 2.0,
    }
