"""Grids of any named axes, and several meshes in one job."""

from itertools import product

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout, all_reduce, bind_meshes
from megatron_parallel.mesh import Grid, GridMesh, bind_grids
from megatron_parallel.testing import Rank, WorkerPool


def test_groups_are_the_ranks_that_differ_only_along_their_axes() -> None:
    grid = Grid(("a", "b", "c"), (2, 3, 2), first_rank=5, joint_axes=(("a", "c"),))
    places = {5 + a + 2 * b + 6 * c: (a, b, c) for c, b, a in product(*map(range, (2, 3, 2)))}
    assert list(grid.ranks) == sorted(places)
    for axes in (("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")):
        kept = [i for i, name in enumerate(grid.names) if name not in axes]
        by_hand: dict[tuple[int, ...], list[int]] = {}
        for rank, place in sorted(places.items()):
            by_hand.setdefault(tuple(place[i] for i in kept), []).append(rank)
        groups = sorted(tuple(ranks) for ranks in by_hand.values())
        assert sorted(grid.groups(axes)) == groups
        for rank in places:
            assert grid.group_of(axes, rank) == next(group for group in groups if rank in group)
    assert list(grid.named_groups) == ["a", "b", "c", "a_c", "world"]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Grid(("a", "a"), (1, 2)), "axis 'a' is named twice"),
        (
            lambda: Grid(("a b",), (2,)),
            "axis 'a b' is not an identifier: use letters, digits and '_'",
        ),
        (lambda: Grid(("a",), (0,)), "a=0 is not a size: give a whole number >= 1"),
        (lambda: Grid(("a",), (1, 2)), "1 axis names were given for 2 sizes"),
        (lambda: Grid.of(a=2).groups(("b",)), "no axis is called 'b': there are a"),
        (lambda: Grid.of(a=2).group_of(("a",), 2), "rank 2 is not on the grid a 2"),
        (lambda: GridMesh(Grid.of(a=2), 0).axis("b"), "rank 0 is in no 'b' group of grid a 2"),
    ],
)
def test_an_invalid_grid_is_reported_in_one_line(make: object, line: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == line


def test_any_named_axes_communicate(worker_pool: WorkerPool) -> None:
    def sums(rank: Rank) -> dict[str, float]:
        grid = Grid(("patch", "replica"), (2, 2))
        with bind_grids({"images": grid})["images"] as mesh:
            value = torch.tensor(2.0**mesh.rank, dtype=torch.float64)
            names = ("patch", "replica", "world")
            return {name: all_reduce(value.clone(), mesh.axis(name)).item() for name in names}

    found = worker_pool.run(sums, ranks=4, timeout=60)
    assert found[0] == {"patch": 1 + 2, "replica": 1 + 4, "world": 15}
    assert found[3] == {"patch": 4 + 8, "replica": 2 + 8, "world": 15}


def test_two_modules_have_separate_meshes(worker_pool: WorkerPool) -> None:
    def places(rank: Rank) -> dict[str, tuple[object, ...]]:
        layouts = {
            "vision": (ParallelLayout(), range(1)),
            "language": (ParallelLayout(tp=2), range(1, 3)),
            "both": (ParallelLayout(pp=3), range(3)),
        }
        meshes = bind_meshes(layouts)
        found = {}
        for name, mesh in meshes.items():
            axis = mesh.axis("model")
            total = all_reduce(torch.tensor(2.0**mesh.rank), axis).item()
            found[name] = (axis.ranks, mesh.axis("pp").index, mesh.world_size, total)
            mesh.close()  # one at a time, so that the others can still communicate
        return found

    vision, *language = worker_pool.run(places, ranks=3, timeout=60)
    assert vision == {"vision": ((0,), 0, 1, 1.0), "both": ((0, 1, 2), 0, 3, 7.0)}
    for index, found in enumerate(language, start=1):
        assert found == {"language": ((1, 2), 0, 2, 6.0), "both": ((0, 1, 2), index, 3, 7.0)}


def test_layouts_that_do_not_fit_are_reported_in_one_line_on_every_rank(
    worker_pool: WorkerPool,
) -> None:
    def lines(rank: Rank) -> list[str]:
        wrong = [
            {"language": (ParallelLayout(tp=2), range(1, 3))},
            {"language": (ParallelLayout(tp=2), range(3))},
            {"vision": (ParallelLayout(), range(1)), "text": (ParallelLayout(dp=1), range(0))},
            {"text": (ParallelLayout(tp=1 + rank.rank), range(2))},
        ]
        messages = []
        for layouts in wrong:
            with pytest.raises(LayoutError) as caught:
                bind_meshes(layouts)
            messages.append(str(caught.value))
        with Mesh.bind(ParallelLayout(tp=2)) as mesh:  # no process group is left
            all_reduce(torch.ones(1), mesh.axis("tp"))
        return messages

    for messages in worker_pool.run(lines, ranks=2, timeout=60):
        assert messages[0] == "language needs ranks 1-2, but the job has 2 ranks"
        assert messages[1].startswith("world size 3 is not a multiple of tp 2")
        assert messages[2] == "text: range(0, 0) is not a range of one or more consecutive ranks"
        assert messages[3].startswith("ranks disagree on text: rank 0: tp 1 x")
