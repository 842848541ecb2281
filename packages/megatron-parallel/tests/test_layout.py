"""Ranks and groups, for cases computed by hand and as properties of every layout."""

import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron_parallel import LayoutError, ParallelLayout

AXES = ["tp", "cp", "ep", "dp", "pp"]


def pairs(*starts: int, step: int) -> list[tuple[int, int]]:
    return [(start, start + step) for start in starts]


def test_sixteen_ranks_tp2_pp4() -> None:
    layout = ParallelLayout(tp=2, pp=4).resolve(16)
    assert layout.dp == 2
    assert layout.groups("tp") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert layout.groups("pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert layout.groups("dp") == pairs(0, 1, 4, 5, 8, 9, 12, 13, step=2)
    assert layout.groups("model") == [(0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15)]
    assert layout.groups("embedding") == pairs(0, 1, 2, 3, step=12)
    assert layout.groups("position_embedding") == [(0,), (1,), (2,), (3,)]


def test_eight_ranks_tp2_pp2() -> None:
    layout = ParallelLayout(tp=2, pp=2).resolve(8)
    assert layout.ranks_of_pipeline_rank(0) == (0, 1, 2, 3) and layout.ranks_of_pipeline_rank(
        1
    ) == (4, 5, 6, 7)
    assert layout.groups("tp") == pairs(0, 2, 4, 6, step=1)
    assert layout.groups("pp") == pairs(0, 1, 2, 3, step=4)
    assert layout.groups("dp") == pairs(0, 1, 4, 5, step=2)


# The next two cases are from megatron-core 0.16.1 (RankGenerator, order tp-cp-ep-dp-pp).


def test_sixteen_ranks_tp2_cp2_pp2() -> None:
    layout = ParallelLayout(tp=2, cp=2, pp=2).resolve(16)
    assert layout.groups("cp") == pairs(0, 1, 4, 5, 8, 9, 12, 13, step=2)
    assert layout.groups("dp") == pairs(0, 1, 2, 3, 8, 9, 10, 11, step=4)
    assert layout.groups("pp") == pairs(*range(8), step=8)
    assert layout.groups("dp_cp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert layout.groups("tp_cp") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_expert_grid_etp1_ep4_pp2_over_a_dense_tp2_cp2() -> None:
    layout = ParallelLayout(tp=2, cp=2, ep=4, etp=1, pp=2).resolve(16)
    assert (layout.dp, layout.expert_dp, layout.expert_tp) == (2, 2, 1)
    assert layout.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert layout.groups("expert_dp") == pairs(0, 1, 2, 3, 8, 9, 10, 11, step=4)
    assert layout.groups("expert_tp") == [(rank,) for rank in range(16)]
    assert layout.groups("tp_ep") == layout.groups("expert_tp_ep") == layout.groups("ep")
    assert layout.groups("expert_tp_ep_pp")[0] == (0, 1, 2, 3, 8, 9, 10, 11)
    assert layout.expert_coordinates(13) == (0, 1, 1, 1)


def test_a_pool_has_aligned_groups_of_every_power_of_two() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, hybrid_cp=True)
    assert sorted(layout.groups("hybrid_cp_1")) == [(rank,) for rank in range(8)]
    assert sorted(layout.groups("hybrid_cp_2")) == layout.groups("cp") == pairs(0, 1, 4, 5, step=2)
    assert layout.groups("hybrid_cp_4") == layout.groups("dp_cp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert layout.group_of("hybrid_cp_2", 6) == (4, 6)
    assert layout.group_names[-3:] == ("hybrid_cp_1", "hybrid_cp_2", "hybrid_cp_4")
    assert "hybrid cp" in str(layout)
    plain = ParallelLayout(tp=2, cp=2, dp=2)
    assert not [name for name in plain.group_names if name.startswith("hybrid")]
    with pytest.raises(LayoutError, match="there is no pool group of 2 ranks: set hybrid_cp"):
        plain.groups("hybrid_cp_2")
    with pytest.raises(LayoutError, match="no pool group of 8 ranks: the pool has 4"):
        layout.groups("hybrid_cp_8")
    with pytest.raises(LayoutError, match="no group is called 'hybrid_cp_3': did you mean"):
        layout.groups("hybrid_cp_3")


def test_a_pool_of_another_size_or_of_cut_groups_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"power of two of .* ranks, not dp 3 x cp 2 = 6"):
        ParallelLayout(cp=2, hybrid_cp=True).resolve(6)
    with pytest.raises(LayoutError, match=r"hybrid_cp .* hierarchical_cp=\(2, 2\)"):
        ParallelLayout(cp=4, hybrid_cp=True, hierarchical_cp=(2, 2))


def test_order_changes_the_groups() -> None:
    layout = ParallelLayout(tp=2, pp=2, order="pp-dp-tp").resolve(8)
    assert layout.groups("pp") == pairs(0, 2, 4, 6, step=1)
    assert layout.groups("dp") == pairs(0, 1, 4, 5, step=2)
    assert layout.groups("tp") == pairs(0, 1, 2, 3, step=4)
    assert layout.ranks_of_pipeline_rank(1) == (1, 3, 5, 7)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    degree = st.sampled_from([1, 1, 2, 3, 4])
    tp, cp, dp, pp = (draw(degree) for _ in range(4))
    order = "-".join(draw(st.permutations(AXES)))
    ep, etp = draw(degree), draw(st.one_of(st.none(), degree))
    try:
        return ParallelLayout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, etp=etp, order=order)
    except LayoutError:
        assume(False)
        raise


@given(layouts())
def test_every_rank_is_in_exactly_one_group_of_each_kind(layout: ParallelLayout) -> None:
    world = list(range(layout.world_size))
    for name in layout.group_names:
        groups = layout.groups(name)
        assert all(list(group) == sorted(group) for group in groups)
        if name not in ("embedding", "position_embedding"):
            assert sorted(chain.from_iterable(groups)) == world
        for rank in world[:: max(1, len(world) // 7)]:
            holding = [group for group in groups if rank in group]
            assert [layout.group_of(name, rank)] == (holding or [()])


@given(layouts())
def test_coordinates_are_indices_in_the_groups(layout: ParallelLayout) -> None:
    assert len({layout.coordinates(rank) for rank in range(layout.world_size)}) == layout.world_size
    for rank in range(0, layout.world_size, 3):
        at = layout.coordinates(rank)
        for name in ("tp", "cp", "dp", "pp"):
            assert layout.group_of(name, rank).index(rank) == getattr(at, name)
        assert rank in layout.ranks_of_pipeline_rank(at.pp)


def test_dp_is_derived_and_must_match_if_given() -> None:
    assert ParallelLayout(tp=2).resolve(6).dp == 3
    assert ParallelLayout(tp=2, dp=3).resolve(6).world_size == 6
    with pytest.raises(LayoutError, match=r"dp=2 does not fit: world size 6 / .* gives dp=3"):
        ParallelLayout(tp=2, dp=2).resolve(6)


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ({"tp": 4, "pp": 2}, 12, r"12 is not a multiple of tp 4 x cp 1 x pp 2 = 8: use 8 or 16"),
        ({"tp": 4}, 2, r"2 is not a multiple of .* = 4: use 4 ranks"),
        ({"tp": 0}, 1, r"tp=0 is not a degree"),
        ({"cp": True}, 1, r"cp=True is not a degree"),
        ({"vpp": 2}, 1, r"vpp=2 needs pipeline parallelism"),
        ({"order": "tp-xp"}, 1, r"unknown axis 'xp'"),
        ({"order": "tp-tp"}, 1, r"names 'tp' twice"),
        ({"pp": 2, "order": "tp-dp"}, 2, r"leaves out 'pp', but pp=2"),
        ({"ep": 4}, 6, r"6 is not a multiple of etp 1 x ep 4 x pp 1 = 4"),
        ({"cp": 2, "pp": 2, "ep": 2, "order": "tp-cp-pp-ep-dp"}, 8, r"put pp last"),
        ({}, 0, r"world size 0"),
    ],
)
def test_invalid_layouts_are_refused_in_one_line(
    settings: dict[str, object], world: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        ParallelLayout(**settings).resolve(world)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_invalid_arguments_of_methods_are_refused() -> None:
    layout = ParallelLayout(tp=2).resolve(4)
    with pytest.raises(LayoutError, match=r"'embeding': did you mean 'embedding'"):
        layout.groups("embeding")
    with pytest.raises(LayoutError, match="rank 4 is outside a world of 4"):
        layout.coordinates(4)
    with pytest.raises(LayoutError, match="pipeline rank 1 does not exist: pp=1"):
        layout.ranks_of_pipeline_rank(1)
    with pytest.raises(LayoutError, match="call resolve"):
        ParallelLayout().groups("tp")


def test_a_layout_of_sixteen_thousand_ranks_takes_little_time_and_no_torch() -> None:
    code = """
import sys, time
start = time.process_time()
from megatron_parallel import ParallelLayout
from megatron_parallel.mesh import draw_layout
layout = ParallelLayout(tp=8, cp=2, ep=8, pp=16).resolve(16384)
for name in layout.group_names:
    layout.groups(name)
draw_layout(layout)
print(time.process_time() - start)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5.0  # CPU seconds; about 0.3 on a development machine
