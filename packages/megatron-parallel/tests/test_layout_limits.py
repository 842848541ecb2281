"""Layouts at their limits: degrees, stages, levels and instances, computed by hand."""

from typing import Any

import pytest
from megatron_parallel import AbstractMesh, LayoutError, ParallelLayout
from megatron_parallel.mesh import Grid
from megatron_parallel.mesh.group_names import (
    canonical_group_name,
    describe_group,
    group_kind,
    pool_group_name,
    stage_group_name,
)
from megatron_parallel.mesh.launcher import environment_number


def test_a_layout_without_settings_is_that_of_one_rank() -> None:
    assert vars(ParallelLayout()) == {
        **dict.fromkeys(("tp", "cp", "ep", "pp", "vpp", "dp_outer"), 1),
        **dict.fromkeys(("dp", "etp", "hierarchical_cp")),
        "hybrid_cp": False,
        "order": "tp-cp-ep-dp-pp",
        "stage_mapping": "loop",
    }


@pytest.mark.parametrize("name", ["tp", "cp", "ep", "dp", "pp", "vpp", "etp", "dp_outer"])
def test_degrees_are_whole_numbers_from_1(name: str) -> None:
    assert getattr(ParallelLayout(**{name: 1}), name) == 1
    wrong: list[Any] = [0, -1, True, 1.0, "2"]
    for value in wrong if name in ("dp", "etp") else [*wrong, None]:
        with pytest.raises(LayoutError, match=f"^{name}={value} is not a degree: give a whole"):
            ParallelLayout(**{name: value})


REFUSED = [
    ({"pp": 1, "vpp": 2}, "vpp=2 needs pipeline parallelism, but pp=1; use at least 2"),
    ({"pp": 2, "vpp": 2, "stage_mapping": "x"}, "stage_mapping=x is neither 'loop' nor 'v'"),
    ({"pp": 2, "stage_mapping": "v"}, "2 chunks per rank, but vpp=1: use 2"),
    ({"pp": 2, "vpp": 3, "stage_mapping": "v"}, "2 chunks per rank, but vpp=3: use 2"),
    ({"cp": 4, "hierarchical_cp": (4,)}, "must be two sizes, .* cp=4, such as 2 2"),
    ({"cp": 4, "hierarchical_cp": (2, 2, 1)}, "such as 2 2"),
    ({"cp": 4, "hierarchical_cp": (-2, -2)}, "such as 2 2"),
    ({"cp": 9, "hierarchical_cp": (3, 2)}, "cp=9, such as 3 3"),
    ({"cp": 5, "hierarchical_cp": (2, 2)}, "cp=5, such as 1 5"),
    ({"dp": 4, "dp_outer": 3}, r"dp_outer=3 does not divide dp 4 x cp 1 = 4 .* use 2 or 4"),
    ({"dp": 3, "cp": 2, "dp_outer": 4}, "does not divide dp 3 x cp 2 = 6 .* use 3 or 6"),
    ({"dp": 3, "hybrid_cp": True}, "needs a power of two .* dp 3 x cp 1 = 3"),
    ({"tp": 2, "order": "cp-dp-pp"}, "leaves out 'tp', but tp=2"),
    ({"dp": 2, "order": "tp-pp"}, "leaves out 'dp', but dp=2"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_contradict_one_another_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelLayout(**settings)


ALLOWED: list[dict[str, Any]] = [
    {"pp": 2, "vpp": 2, "stage_mapping": "v"},
    {"cp": 4, "hierarchical_cp": (1, 4)},
    {"cp": 4, "hierarchical_cp": (4, 1)},
    {"dp": 4, "dp_outer": 4},
    {"dp": 1, "cp": 4, "dp_outer": 2},
    {"dp": 4, "cp": 2, "hybrid_cp": True},
    {"dp": 1, "hybrid_cp": True},
    {"tp": 1, "order": "cp-dp-pp"},
    {"order": "pp"},
]


@pytest.mark.parametrize("settings", ALLOWED, ids=str)
def test_settings_that_just_fit_are_allowed(settings: dict[str, Any]) -> None:
    assert settings.items() <= vars(ParallelLayout(**settings)).items()


def test_levels_of_context_parallelism_are_neighbours_and_their_peers() -> None:
    layout = ParallelLayout(tp=2, cp=4, dp=1, hierarchical_cp=(2, 2))
    assert layout.groups("cp_inner") == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert layout.groups("cp_outer") == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert layout.group_of("cp_inner", 6) == (4, 6) and layout.group_of("cp_outer", 6) == (2, 6)
    assert {"cp_inner", "cp_outer"} <= {*layout.group_names}
    plain = ParallelLayout(cp=4, dp=1)
    assert not {"cp_inner", "cp_outer", "dp_cp_inner"} & {*plain.group_names}
    with pytest.raises(LayoutError, match="there is no 'cp_inner' group: set hierarchical_cp"):
        plain.groups("cp_inner")


def test_instances_of_the_optimizer_are_near_ranks() -> None:
    layout = ParallelLayout(dp=4, dp_outer=2)
    assert layout.groups("dp_cp_inner") == [(0, 1), (2, 3)]
    assert layout.groups("dp_cp_outer") == [(0, 2), (1, 3)]
    assert {"dp_cp_inner", "dp_cp_outer"} <= {*layout.group_names}
    # Data- and context-parallel ranks are cut together.
    both = ParallelLayout(cp=2, dp=2, dp_outer=2)
    assert both.groups("dp_cp_inner") == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("mapping", "vpp", "stages"),
    [
        ("loop", 1, [(0,), (1,), (2,)]),
        ("loop", 2, [(0, 3), (1, 4), (2, 5)]),
        ("loop", 3, [(0, 3, 6), (1, 4, 7), (2, 5, 8)]),
        ("v", 2, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_of_pipeline_ranks(mapping: Any, vpp: int, stages: list[tuple[int, ...]]) -> None:
    layout = ParallelLayout(pp=3, vpp=vpp, stage_mapping=mapping).resolve(3)
    assert [layout.stages(index) for index in range(3)] == stages
    for index, held in enumerate(stages):
        assert [layout.pipeline_rank_of(stage) for stage in held] == [index] * len(held)
    last = next(index for index, held in enumerate(stages) if 3 * vpp - 1 in held)
    assert layout.groups("embedding") == [tuple(dict.fromkeys((0, last)))]
    for wrong in (-1, 3 * vpp):
        with pytest.raises(LayoutError, match=f"stage {wrong} does not exist: there are 3 x {vpp}"):
            layout.pipeline_rank_of(wrong)
    for wrong in (-1, 3):
        with pytest.raises(LayoutError, match=f"pipeline rank {wrong} does not exist: pp=3"):
            layout.stages(wrong)
        with pytest.raises(LayoutError, match=f"pipeline rank {wrong} does not exist: pp=3"):
            layout.ranks_of_pipeline_rank(wrong)


def test_ranks_and_stages_outside_of_a_layout_are_refused() -> None:
    layout = ParallelLayout(tp=2, pp=2).resolve(4)
    for ask in (layout.coordinates, layout.expert_coordinates, lambda r: layout.group_of("tp", r)):
        assert ask(0) is not None and ask(3) is not None
        for rank in (-1, 4):
            with pytest.raises(LayoutError, match=f"rank {rank} is outside a world of 4 ranks"):
                ask(rank)
    assert layout.groups("stages_0_1") == [(0, 2), (1, 3)]
    assert layout.groups("stages_1") == [(2,), (3,)]
    with pytest.raises(LayoutError, match="pipeline rank 2 does not exist: pp=2"):
        layout.groups("stages_0_2")


def test_copies_of_experts_follow_from_their_degrees() -> None:
    for settings, of_experts, degree, copies in (
        ({"tp": 2}, False, 2, 4),
        ({"tp": 2, "etp": 2}, False, 2, 4),
        ({"tp": 2, "etp": 1}, True, 1, 8),
        ({"tp": 2, "ep": 2}, True, 2, 2),
        ({"tp": 2, "ep": 4, "etp": 1}, True, 1, 2),
    ):
        layout = ParallelLayout(**settings).resolve(8)
        assert layout.has_expert_parallelism == of_experts
        assert (layout.expert_tp, layout.expert_dp) == (degree, copies)


def test_a_layout_as_text_names_all_that_differs_from_the_usual() -> None:
    assert str(ParallelLayout()) == "tp 1 x cp 1 x dp ? x pp 1, order tp-cp-ep-dp-pp"
    layout = ParallelLayout(
        tp=2,
        cp=4,
        ep=2,
        dp=2,
        pp=2,
        vpp=2,
        hierarchical_cp=(1, 4),
        dp_outer=2,
        stage_mapping="v",
    )
    assert str(layout) == (
        "tp 2 x cp 4 x dp 2 x pp 2, experts etp 2 x ep 2, cp 1 inside x 4 outside, 2 instances, "
        "2 chunks per pipeline rank in a V, order tp-cp-ep-dp-pp"
    )


def test_names_of_groups() -> None:
    assert (pool_group_name(4), stage_group_name((3, 0, 3))) == ("hybrid_cp_4", "stages_0_3")
    assert group_kind("stages_0_3").axes == ("0", "3") and group_kind("stages_0_3").size == 0
    assert [group_kind(f"hybrid_cp_{size}").size for size in (1, 2, 8)] == [1, 2, 8]
    for name, same in {"tp_pp": "model", "tp_ep": "expert_tp_ep", "tp": "tp"}.items():
        assert canonical_group_name(name) == same
        assert describe_group(name) == describe_group(same)
    for name in ("hybrid_cp_0", "hybrid_cp_02", "hybrid_cp_6", "stages_", "stages_1_"):
        with pytest.raises(LayoutError, match=f"no group is called '{name}'"):
            group_kind(name)
    with pytest.raises(
        LayoutError,
        match=r"'xyz': there are tp, cp, .*, tp_pp, .*, hybrid_cp_2, hybrid_cp_4, hybrid_cp_8$",
    ):
        canonical_group_name("xyz")


def test_a_mesh_without_processes_has_coordinates() -> None:
    layout = ParallelLayout(tp=2, pp=3).resolve(6)
    inner = AbstractMesh(layout, 3)
    assert (inner.axis("tp").size, inner.axis("tp").index) == (2, 1)
    assert (inner.axis("pp").size, inner.axis("pp").index) == (3, 1)
    assert inner.axis("embedding").size == 0 and not inner.has_axis("embedding")
    assert inner.has_axis("tp_pp") and not inner.has_axis("cp_inner")
    assert AbstractMesh(layout).axis("tp").index == 0 == inner.axis("embedding").index
    assert AbstractMesh(layout, 4).axis("embedding").index == 1


def test_a_grid_may_begin_at_any_rank_but_a_negative_one() -> None:
    grid = Grid(("a", "b"), (2, 3), first_rank=4)
    assert (str(grid), str(Grid.of(a=2, b=1))) == ("a 2 x b 3 from rank 4", "a 2 x b 1")
    assert grid.world_size == 6 and grid.ranks == range(4, 10) and grid.size("b") == 3
    assert [grid.coordinate("b", rank) for rank in grid.ranks] == [0, 0, 1, 1, 2, 2]
    assert grid.strides == {"a": 1, "b": 2}
    for rank in (3, 10):
        with pytest.raises(LayoutError, match=f"rank {rank} is not on the grid"):
            grid.group_of(("a",), rank)
    with pytest.raises(LayoutError, match="first_rank=-1 is not a rank"):
        Grid(("a",), (1,), first_rank=-1)
    with pytest.raises(LayoutError, match="no axis is called 'c'"):
        Grid(("a",), (1,), joint_axes=(("a", "c"),))


@pytest.mark.parametrize("text", ["3", " 5\n", "0004", "0000000004"])
def test_numbers_of_a_launcher_are_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NUMBER", text)
    assert environment_number("NUMBER", 3, 5) == int(text)


@pytest.mark.parametrize("text", ["2", "6", "", "3.0", "+4", "-4", "\u0664", "00000000004"])
def test_other_numbers_of_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("NUMBER", text)
    with pytest.raises(LayoutError, match=r"NUMBER is .*: set it to a whole number from 3 to 5"):
        environment_number("NUMBER", 3, 5)
