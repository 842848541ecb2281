"""Functions of whole tensors that ranks hold in boxes."""

import pytest
import torch
from megatron_parallel import Mesh, ParallelLayout, Sharding
from megatron_parallel.collectives.traffic import Traffic
from megatron_parallel.errors import LayoutError
from megatron_parallel.sharding import Box, Cut, Region, map_whole, tensor_parallel_cut
from megatron_parallel.testing import WorkerPool
from torch import Tensor

SHAPES = ((7, 2), (2, 5), (4, 3), (3, 3))
DIMS = (0, 0, 1, 0)


def whole(number: int) -> Tensor:
    return torch.arange(1.0, 36.0)[: torch.Size(SHAPES[number]).numel()].view(SHAPES[number])


def cut_of(mesh: Mesh, number: int) -> Cut:
    """Returns a cut like that of `torch.chunk`, whose last boxes may be small or empty."""
    axis, shape, dim = mesh.axis("dp"), SHAPES[number], DIMS[number]
    length, boxes = -(-shape[dim] // axis.size), []
    for rank in range(axis.size):
        start = min(rank * length, shape[dim])
        size = min(length, shape[dim] - start)
        offsets = tuple(start if d == dim else 0 for d in range(2))
        boxes.append(Box(offsets, tuple(size if d == dim else n for d, n in enumerate(shape))))
    return Cut(axis, shape, tuple(boxes))


def changed(tensor: Tensor) -> Tensor:
    """Returns a function of a whole matrix, which no shard can compute by itself."""
    return tensor @ tensor.mT @ tensor


def results(
    mesh: Mesh, everywhere: bool, costs: tuple[float, ...] | None
) -> tuple[list[Tensor], list[int], list[str]]:
    cuts = [cut_of(mesh, number) for number in range(len(SHAPES))]
    boxes = [whole(number)[cut.own.slices] for number, cut in enumerate(cuts)]
    called: list[int] = []

    def function(indices: list[int], wholes: list[Tensor]) -> list[Tensor]:
        called.extend(indices)
        return [changed(tensor) for tensor in wholes]

    with mesh.counting() as traffic:
        found = map_whole(
            boxes, cuts, function, costs=costs, everywhere=everywhere, purpose="tests"
        )
    return found, called, sorted(record.operation for record in traffic.records)


@pytest.mark.parametrize("everywhere", [False, True])
def test_boxes_of_the_results_come_back(worker_pool: WorkerPool, everywhere: bool) -> None:
    layout = ParallelLayout(dp=3)
    ranks = worker_pool.run_mesh(layout, results, everywhere, None)
    for number, dim in enumerate(DIMS):
        parts = [found[number] for found, _, _ in ranks]
        assert torch.equal(torch.cat(parts, dim), changed(whole(number))), number
    calls = [called for _, called, _ in ranks]
    everything = list(range(len(SHAPES)))
    if everywhere:
        assert calls == [everything] * 3
        assert ranks[0][2] == ["all_gather of tests"]
    else:
        assert sorted(index for called in calls for index in called) == everything
        assert ranks[0][2] == ["all_to_all of changed tests", "all_to_all of tests"]


def test_the_work_is_shared_by_cost(worker_pool: WorkerPool) -> None:
    ranks = worker_pool.run_mesh(ParallelLayout(dp=3), results, False, (1.0, 9.0, 4.0, 4.0))
    # The dearest tensor goes to the first rank; the cheapest one to a rank with less work.
    assert [sorted(called) for _, called, _ in ranks] == [[1], [0, 2], [3]]


def test_no_tensors_need_no_messages() -> None:
    assert map_whole([], [], lambda indices, wholes: wholes) == []


def test_the_cut_of_a_parameter_covers_it_once(worker_pool: WorkerPool) -> None:
    sharding = Sharding((4, 2, 6, 5), "expert_tp", 2, fused_dim=1, experts=True)
    layout = ParallelLayout(tp=2, dp=2, ep=2, etp=2)
    for shape, boxes, own in worker_pool.run_mesh(layout, _cut, sharding):
        assert shape == (2, 2, 6, 5)  # the experts of this rank
        assert boxes == (Box((0, 0, 0, 0), (2, 2, 3, 5)), Box((0, 0, 3, 0), (2, 2, 3, 5)))
        assert own in boxes
    assert tensor_parallel_cut(sharding, Mesh.single()) is None
    assert tensor_parallel_cut(Sharding((3, 4)), Mesh.single()) is None


def test_padded_parameters_are_refused(worker_pool: WorkerPool) -> None:
    padded = Sharding((7, 3), "tp", 0, padded=8)
    for message in worker_pool.run_mesh(ParallelLayout(tp=2, dp=1), _refusal, padded):
        assert message == "shape (7, 3) is padded, so its boxes are not equal"


def _cut(mesh: Mesh, sharding: Sharding) -> tuple[tuple[int, ...], tuple[Box, ...], Box]:
    cut = tensor_parallel_cut(sharding, mesh)
    assert cut is not None
    return cut.shape, cut.boxes, cut.own


def _refusal(mesh: Mesh, sharding: Sharding) -> str:
    with pytest.raises(LayoutError) as caught:
        tensor_parallel_cut(sharding, mesh)
    return str(caught.value)


def test_pieces_of_a_flat_shard_are_views() -> None:
    region = Region(None, (Box((0, 1), (1, 2)), Box((1, 0), (2, 3)), Box((3, 0), (1, 1))))
    flat = torch.arange(9.0)
    pieces = region.pieces(flat)
    assert [piece.tolist() for piece, _ in pieces] == [[[0, 1]], [[2, 3, 4], [5, 6, 7]], [[8]]]
    pieces[1][0].zero_()
    assert flat.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 8]


def test_a_shard_of_one_box_need_not_be_contiguous() -> None:
    box, shard = Box((0, 0), (3, 2)), torch.arange(6.0).view(2, 3).t()
    ((piece, where),) = Region(None, (box,)).pieces(shard)
    assert piece is shard and where == box


def test_fused_sizes_must_add_up() -> None:
    assert Sharding((2, 7, 3), fused_sizes=(4, 2, 1)).matrix == (14, 3)
    with pytest.raises(
        LayoutError, match=r"fused_sizes=\(4, 2\) do not add up to the last dim but"
    ):
        Sharding((2, 7, 3), fused_sizes=(4, 2))


def test_a_flat_shard_of_one_box_is_viewed_as_the_box() -> None:
    ((piece, _),) = Region(None, (Box((0, 1), (2, 2)),)).pieces(torch.arange(4.0))
    assert piece.tolist() == [[0, 1], [2, 3]]


def test_the_cut_of_a_parameter_that_is_not_of_experts_has_boxes_of_the_whole() -> None:
    mesh = Mesh(ParallelLayout(tp=2, dp=1), 1)
    cut = tensor_parallel_cut(Sharding((4, 6), "tp", 0), mesh)
    assert cut is not None and cut.shape == (4, 6)
    assert cut.boxes == (Box((0, 0), (2, 6)), Box((2, 0), (2, 6))) and cut.own == cut.boxes[1]


def test_work_is_shared_unless_every_rank_is_to_have_all_results() -> None:
    boxes, traffic = (Box((0, 0), (2, 2)), Box((2, 0), (2, 2))), Traffic()
    with Mesh.imagined(ParallelLayout(dp=2)) as mesh:
        axis = mesh.axis("dp")
        axis.ledger.open.append(traffic)
        cuts = [Cut(axis, (4, 2), boxes)]
        map_whole([torch.ones(2, 2)], cuts, lambda indices, wholes: wholes)
    assert [record[1:3] for record in traffic.records] == [("all_to_all", 2)]
