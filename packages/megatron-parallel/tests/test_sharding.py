"""Parts of parameters as boxes of global tensors."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_parallel import (
    LayoutError,
    Mesh,
    ParallelLayout,
    Sharding,
    collect_shardings,
    parameter_views,
)
from megatron_parallel.sharding import (
    ONES,
    ZEROS,
    Box,
    flat_range_boxes,
    flat_range_views,
    initialize,
)
from torch import nn


class Part(nn.Module):
    """A module with parameters and their shardings."""

    def __init__(self, **parameters: tuple[tuple[int, ...], Sharding]) -> None:
        super().__init__()
        self.sharding = {name: sharding for name, (_, sharding) in parameters.items()}
        for name, (shape, _) in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def assemble(sharding: Sharding, meshes: list[Mesh], parts: list[torch.Tensor]) -> torch.Tensor:
    """Assembles the parts of all ranks by their boxes; fails on gaps and overlaps."""
    whole = torch.zeros(sharding.shape)
    hits = torch.zeros(sharding.shape, dtype=torch.int64)
    for mesh, part in zip(meshes, parts, strict=True):
        for box, local in sharding.shard_boxes(mesh):
            whole[box.slices] = part[local.slices]
            hits[box.slices] += 1
    assert hits.unique().tolist() == [1]
    return whole


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_along_any_dim_form_the_whole(tensor_ranks: list[Mesh], dim: int) -> None:
    whole = torch.arange(24.0 * 12 * 36).reshape(24, 12, 36)
    sharding = Sharding((24, 12, 36), "tp", dim)
    parts = list(whole.chunk(len(tensor_ranks), dim))
    assert [part.shape for part in parts] == [sharding.local_shape(mesh) for mesh in tensor_ranks]
    assert torch.equal(assemble(sharding, tensor_ranks, parts), whole)


def test_a_parameter_that_is_not_cut_is_held_whole(tensor_ranks: list[Mesh]) -> None:
    sharding = Sharding((5, 7))
    for mesh in tensor_ranks:
        assert sharding.boxes(mesh) == (Box((0, 0), (5, 7)),)
        assert sharding.replica(mesh) == mesh.rank


def test_padded_vocabulary_is_clipped_and_a_part_may_be_empty() -> None:
    layout = ParallelLayout(tp=4).resolve(4)
    sharding = Sharding((130, 8), "tp", 0, padded=256)
    lengths = []
    for rank in range(4):
        mesh = Mesh(layout, rank)
        assert sharding.local_shape(mesh) == (64, 8)
        lengths.append(sharding.box(mesh).lengths[0])
    assert lengths == [64, 64, 2, 0]
    assert sharding.boxes(Mesh(layout, 3)) == ()
    assert parameter_views({"w": torch.zeros(64, 8)}, {"w": sharding}, Mesh(layout, 3)) == {"w": []}


def test_a_padded_dim_can_be_cut_into_any_number_of_parts(tensor_ranks: list[Mesh]) -> None:
    sharding = Sharding((100, 4), "tp", 0, padded=128)
    rows = [sharding.local_shape(mesh)[0] for mesh in tensor_ranks]
    assert sum(rows) >= 128 and sum(rows) - 128 < len(tensor_ranks)
    assert sum(sharding.box(mesh).lengths[0] for mesh in tensor_ranks) == 100


def test_ranks_that_hold_the_same_box_have_different_replica_numbers() -> None:
    layout = ParallelLayout(tp=2, cp=2, pp=2).resolve(16)
    for sharding, copies in ((Sharding((4, 4), "tp", 0), 4), (Sharding((4,)), 8)):
        held: dict[tuple[int, Box], list[int]] = {}
        for rank in range(16):
            mesh = Mesh(layout, rank)
            key = layout.coordinates(rank).pp, sharding.box(mesh)
            held.setdefault(key, []).append(sharding.replica(mesh))
        assert all(sorted(replicas) == list(range(copies)) for replicas in held.values())


def test_defaults_derived_from_the_shape() -> None:
    bias, matrix, fused = Sharding((8,)), Sharding((2, 3, 8)), Sharding((2, 3, 8), fused_dim=0)
    assert (bias.matrix, bias.weight_decay) == (None, False)
    assert (matrix.matrix, matrix.weight_decay, matrix.fully_shard_dim) == ((6, 8), True, 0)
    assert (fused.matrix, fused.weight_decay, fused.fully_shard_dim) == ((6, 8), True, 1)
    fused_bias = Sharding((2, 8), fused_dim=0)
    assert (fused_bias.matrix, fused_bias.weight_decay) == (None, False)
    assert Sharding((2, 8), weight_decay=False).weight_decay is False
    assert Sharding(()).weight_decay is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (4,), "axis": "tp"}, "must be given together"),
        ({"shape": (4,), "axis": "tp", "dim": 1}, "not a dim of shape"),
        ({"shape": (2, 4), "axis": "tp", "dim": 0, "fused_dim": 0}, "fused and cannot be cut"),
        ({"shape": (4,), "axis": "tp", "dim": 0, "padded": 3}, "padded=3 does not cover"),
        ({"shape": (4, 4), "matrix": (3, 4)}, "have different numbers of elements"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Sharding(**arguments)  # type: ignore[arg-type]


def test_a_dim_that_does_not_divide_is_refused_with_its_numbers() -> None:
    mesh = Mesh(ParallelLayout(tp=4).resolve(4), 0)
    with pytest.raises(LayoutError, match=r"dim 0 of shape \(6, 2\) cannot be cut into 4 equal"):
        Sharding((6, 2), "tp", 0).local_shape(mesh)


# -- flat ranges -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_flat_ranges_are_covered_by_few_boxes_in_order(
    sizes: list[int], data: st.DataObject
) -> None:
    shape, numel = tuple(sizes), prod(sizes)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    covered = [i for box in boxes for i in numbers[box.slices].flatten().tolist()]
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    assert len(flat_range_boxes((4, 4, 4), 5, 59)) == 5


def test_views_of_bucket_shards_form_the_global_tensor(tensor_ranks: list[Mesh]) -> None:
    sharding = Sharding((10, 3, 4), "tp", 0, padded=16)
    whole = torch.zeros(10, 3, 4)
    for mesh in tensor_ranks:
        shape = sharding.local_shape(mesh)
        first = sharding.local_length(mesh) * mesh.rank
        rows = torch.arange(prod(shape), dtype=torch.float32) + 1000 * first
        cuts = [0, 5, 23, prod(shape)]
        for start, stop in pairwise(cuts):
            for view in flat_range_views(rows[start:stop], start, sharding, mesh, replica=2):
                assert view.replica == 2 and tuple(view.tensor.shape) == view.lengths
                box = Box(view.offsets, view.lengths)
                assert (whole[box.slices] == 0).all()
                whole[box.slices] = view.tensor + 1
    expected = [
        (torch.arange(prod(sharding.local_shape(mesh))) + 1000.0 * sharding.local_length(mesh) * i)
        .reshape(sharding.local_shape(mesh))
        .add(1)
        for i, mesh in enumerate(tensor_ranks)
    ]
    assert torch.equal(whole, torch.cat(expected)[:10])
    (view,) = flat_range_views(torch.ones(2), 1, Sharding((3,)), Mesh.single())
    assert (view.replica, view.offsets) == (0, (1,))


# -- tables ------------------------------------------------------------------------------------


def test_the_table_has_global_names_and_a_tied_parameter_once() -> None:
    cut = Sharding((4, 2), "tp", 0)
    first, last = Part(weight=((4, 2), cut)), Part(weight=((4, 2), cut))
    last.weight = first.weight
    layers = nn.ModuleDict({"7": Part(gain=((2,), Sharding((2,))))})
    model = nn.ModuleDict({"embedding": first, "layers": layers, "output": last})
    assert collect_shardings(model) == {
        "embedding.weight": cut,
        "layers.7.gain": Sharding((2,)),
    }


def test_a_parameter_without_a_sharding_is_named() -> None:
    with pytest.raises(LayoutError, match=r"'0\.weight' has no sharding: .* of Linear"):
        collect_shardings(nn.Sequential(nn.Linear(2, 2)))


def test_parameter_views_share_memory_and_check_shapes(single: Mesh) -> None:
    model = Part(weight=((6, 2), Sharding((5, 2), "tp", 0, padded=6)))
    views = parameter_views(model, collect_shardings(model), single)
    (view,) = views["weight"]
    assert (view.global_shape, view.offsets, view.lengths) == ((5, 2), (0, 0), (5, 2))
    view.tensor.fill_(3.0)
    assert model.weight.sum() == 30.0
    with pytest.raises(
        LayoutError, match=r"'weight' has shape \(5, 2\), but its sharding needs \(6, 2"
    ):
        parameter_views({"weight": torch.zeros(5, 2)}, collect_shardings(model), single)
    with pytest.raises(LayoutError, match="'other' is not in the sharding table"):
        parameter_views({"other": torch.zeros(1)}, {}, single)


EXPERTS = Sharding((4, 2, 6, 5), "expert_tp", 2, fused_dim=1, experts=True)


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "etp": 1}])
def test_every_element_of_the_experts_has_one_replica_zero(degrees: dict[str, int]) -> None:
    layout = ParallelLayout(**degrees).resolve(8)
    counted = torch.zeros(EXPERTS.shape)
    for mesh in (Mesh(layout, rank) for rank in range(8)):
        ((box, local),) = EXPERTS.shard_boxes(mesh)
        assert local.lengths == EXPERTS.local_shape(mesh) == box.lengths
        place = layout.expert_coordinates(mesh.rank)
        assert EXPERTS.replica(mesh) == place.dp
        assert EXPERTS.expert_indices(mesh).start == place.ep * 4 // layout.ep
        counted[box.slices] += EXPERTS.replica(mesh) == 0
    assert (counted == 1).all()


def test_the_matrix_of_experts_is_that_of_one_expert() -> None:
    assert EXPERTS.matrix == (12, 5) and EXPERTS.weight_decay and EXPERTS.fully_shard_dim == 2
    bias = Sharding((4, 6), "expert_tp", 1, experts=True)
    assert bias.matrix is None and not bias.weight_decay and bias.fully_shard_dim == 1
    assert EXPERTS.single_expert == Sharding((2, 6, 5), "expert_tp", 1, fused_dim=0)


def test_experts_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(LayoutError, match="dim 0 of shape \\(4, 6\\) enumerates experts"):
        Sharding((4, 6), "expert_tp", 0, experts=True)
    mesh = Mesh(ParallelLayout(ep=3).resolve(3), 0)
    with pytest.raises(LayoutError, match="4 experts cannot be cut into 3 equal parts over axis"):
        EXPERTS.local_shape(mesh)
    with pytest.raises(LayoutError, match="replicas of experts cut over axis 'tp'"):
        Sharding((4, 6), "tp", 1, experts=True).replica(Mesh.single())


def test_replicas_of_parameters_not_cut_within_an_expert_have_numbers() -> None:
    """All ranks with the same experts have different replica numbers."""
    layout = ParallelLayout(tp=2, ep=2, etp=2).resolve(8)
    whole = Sharding((4, 3, 6), experts=True, partial="expert_tp")
    numbers: dict[int, list[int]] = {}
    for mesh in (Mesh(layout, rank) for rank in range(8)):
        assert whole.local_shape(mesh) == (2, 3, 6)
        numbers.setdefault(whole.expert_indices(mesh).start, []).append(whole.replica(mesh))
        assert whole.replica(mesh, sharded=True) == mesh.axis("expert_tp").index
    assert {start: sorted(found) for start, found in numbers.items()} == {
        0: [0, 1, 2, 3],
        2: [0, 1, 2, 3],
    }


# -- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (4,), "dim": 0}, "must be given together"),
        ({"shape": (4,), "axis": "tp", "dim": -1}, "dim=-1 is not a dim"),
        ({"shape": (4,), "fused_dim": 1}, "fused_dim=1 is not a dim"),
        ({"shape": (4,), "axis": "tp", "dim": 0, "spill_dim": 1}, "spill_dim=1 is not a dim"),
        ({"shape": (4, 2), "spill_dim": 1}, "needs another dim that is cut, without padding"),
        ({"shape": (4, 2), "axis": "tp", "dim": 1, "spill_dim": 1}, "needs another dim"),
        (
            {"shape": (4, 2), "axis": "tp", "dim": 0, "spill_dim": 1, "padded": 4},
            "needs another dim",
        ),
        ({"shape": (4,), "padded": 4}, "padded=4 does not cover dim=None"),
        ({"shape": (4,), "axis": "tp", "dim": 0, "partial": "tp"}, "cannot be partial over"),
        ({"shape": (4, 2), "fused_dim": 0, "experts": True}, "enumerates experts"),
        ({"shape": (), "experts": True}, "enumerates experts"),
        ({"shape": (4, 2, 3), "experts": True, "matrix": (8, 3)}, "have different numbers"),
    ],
)
def test_more_contradictions_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Sharding(**arguments)  # type: ignore[arg-type]


def test_what_just_fits_is_allowed() -> None:
    assert Sharding((4,), "tp", 0, padded=4).padded == 4
    assert Sharding((4, 2), "tp", 1, spill_dim=0).spill_dim == 0
    assert Sharding((4,), "tp", 0, partial="cp").partial == "cp"
    assert Sharding((4, 2, 3), experts=True, matrix=(3, 2)).matrix == (3, 2)
    usual = Sharding((4, 2))
    assert not (usual.experts or usual.vocabulary or usual.vector) and usual.fused_sizes == ()
    assert (usual.init.kind, usual.init.scale, usual.init.low) == ("normal", 0.02, 0.0)
    assert [(each.kind, each.scale) for each in (ZEROS, ONES)] == [("constant", 0), ("constant", 1)]


def test_dims_that_may_be_cut_and_drawn() -> None:
    assert (Sharding((4, 2), "tp", 1).block_dim, Sharding((4, 2), "tp", 1).fully_shard_dim) == (
        1,
        0,
    )
    assert (Sharding(()).block_dim, Sharding((2,), fused_dim=0).fully_shard_dim) == (0, 0)
    for sharding, hidden in (
        (Sharding((4, 2)), True),
        (Sharding((4, 2), vocabulary=True), False),
        (Sharding((4, 2), vector=True), False),
        (Sharding((4,)), False),
    ):
        assert sharding.hidden_matrix == hidden


@pytest.mark.parametrize(
    ("ranks", "shared", "shape"), [(1, 1, (2, 6)), (2, 1, (1, 6)), (4, 2, (1, 3)), (6, 3, (1, 2))]
)
def test_ranks_that_share_an_entry_cut_another_dim(
    ranks: int, shared: int, shape: tuple[int, int]
) -> None:
    sharding, layout = Sharding((2, 6), "tp", 0, spill_dim=1), ParallelLayout(tp=ranks, dp=1)
    hits = torch.zeros(2, 6)
    for mesh in (Mesh(layout, rank) for rank in range(ranks)):
        assert sharding.ranks_per_entry(mesh) == shared
        assert sharding.local_shape(mesh) == shape == sharding.box(mesh).lengths
        hits[sharding.box(mesh).slices] += mesh.rank + 1
    order = torch.arange(1.0, ranks + 1).view(-1, 1).expand(-1, 12 // ranks)
    assert torch.equal(hits, order.reshape(2, 6))


@pytest.mark.parametrize(("ranks", "width"), [(3, 6), (4, 5)])
def test_ranks_that_cannot_share_an_entry_are_refused(ranks: int, width: int) -> None:
    mesh = Mesh(ParallelLayout(tp=ranks, dp=1), 0)
    with pytest.raises(LayoutError, match=f"^{ranks} ranks of axis 'tp' cannot share the 2 entr"):
        Sharding((2, width), "tp", 0, spill_dim=1).local_shape(mesh)
    with pytest.raises(LayoutError, match=r"shape \(2,\) is not cut"):
        Sharding((2,)).local_length(mesh)


def test_local_matrices_are_products_of_leading_and_trailing_dims() -> None:
    mesh = Mesh(ParallelLayout(tp=2, ep=2, etp=2).resolve(4), 0)
    assert Sharding((2, 6, 8), "tp", 1).local_matrix(mesh) == (6, 8)
    assert Sharding((6, 2, 4), "tp", 0, matrix=(6, 8)).local_matrix(mesh) == (3, 8)
    assert EXPERTS.local_matrix(mesh) == (2, 6, 5)
    with pytest.raises(LayoutError, match=r"cannot be split into the dims of \(3, 16\)"):
        Sharding((6, 8), matrix=(3, 16)).local_matrix(mesh)


def test_replicas_of_tied_and_sharded_parameters() -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    cut, whole, tied = Sharding((4,), "tp", 0), Sharding((4,)), Sharding((4,), tied="embedding")
    found = [[each.replica(Mesh(layout, r)) for r in range(8)] for each in (cut, whole, tied)]
    assert found == [[0, 0, 1, 1] * 2, [0, 1, 2, 3] * 2, [*range(8)]]
    sharded = [
        [each.replica(Mesh(layout, r), sharded=True) for r in range(8)] for each in (cut, whole)
    ]
    assert sharded == [[0] * 8, [0, 1] * 4]
    instances = ParallelLayout(dp=4, dp_outer=2)
    assert [whole.replica(Mesh(instances, r), sharded=True) for r in range(4)] == [0, 0, 1, 1]
    with pytest.raises(LayoutError, match="replicas of a parameter cut over axis 'cp' have no"):
        Sharding((4,), "cp", 0).replica(Mesh.single())


def test_boxes_meet_where_both_are() -> None:
    box = Box((1, 2), (3, 2))
    assert box.intersection(Box((2, 0), (9, 3))) == Box((2, 2), (2, 1))
    assert box.intersection(Box((4, 2), (1, 2))).numel == 0  # they touch
    assert box.intersection(Box((7, 2), (1, 2))).lengths == (0, 2)
    assert (box.numel, Box((), ()).numel) == (6, 1)
    assert box.shifted((-1, 1)) == Box((0, 3), (3, 2))
    assert Sharding((3, 2), "tp", 0, padded=8).box(Mesh(ParallelLayout(tp=2, dp=1), 1)) == Box(
        (3, 2), (0, 0)
    )


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_ranges_outside_of_a_tensor_are_refused(start: int, stop: int) -> None:
    with pytest.raises(
        LayoutError, match=f"range {start}:{stop} is outside shape .* of 6 elements"
    ):
        flat_range_boxes((2, 3), start, stop)
    assert flat_range_boxes((2, 3), 6, 6) == ()
    assert flat_range_boxes((2, 3), 0, 6) == (Box((0, 0), (2, 3)),)
    assert flat_range_boxes((2, 3), 1, 5) == (Box((0, 1), (1, 2)), Box((1, 0), (1, 2)))


def test_constants_fill_the_parameter_but_not_its_padding() -> None:
    mesh = Mesh(ParallelLayout(tp=2, dp=1), 1)
    sharding = Sharding((5, 2), "tp", 0, padded=8, init=ONES)
    values = torch.full((4, 2), torch.nan)
    initialize(values, seed=1, name="w", sharding=sharding, mesh=mesh)
    assert values.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
