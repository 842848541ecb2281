"""Groups of ranks equal those of megatron-core's rank generator."""

import random
from collections.abc import Iterator

import pytest
from megatron_parallel import LayoutError, ParallelLayout

parallel_state = pytest.importorskip("megatron.core.parallel_state")

DENSE = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "model": "tp-pp",
}
EXPERT = {
    "ep": "ep",
    "expert_tp": "tp",
    "expert_dp": "dp",
    "expert_tp_ep": "tp-ep",
    "expert_tp_ep_pp": "tp-ep-pp",
}


def random_layouts(count: int) -> Iterator[ParallelLayout]:
    """Yields layouts of up to 768 ranks in which the expert grid divides the world size."""
    choose = random.Random(20260101)
    while count:
        axes = ["tp", "cp", "ep", "dp", "pp"]
        choose.shuffle(axes)
        tp, cp, dp, pp = (choose.choice([1, 1, 2, 3, 4]) for _ in range(4))
        experts_tp, ep = choose.choice([None, 1, 2, tp]), choose.choice([1, 1, 2, 4, 8])
        try:
            yield ParallelLayout(
                tp=tp, cp=cp, ep=ep, pp=pp, etp=experts_tp, order="-".join(axes)
            ).resolve(tp * cp * dp * pp)
        except LayoutError:
            continue
        count -= 1


def their_groups(layout: ParallelLayout, names: dict[str, str], expert: bool) -> dict[str, object]:
    world, tp = layout.world_size, layout.expert_tp if expert else layout.tp
    ep, cp = (layout.ep, 1) if expert else (1, layout.cp)
    dp = world // (tp * ep * cp * layout.pp)
    theirs = parallel_state.RankGenerator(tp, ep, dp, layout.pp, cp, layout.order)
    return {ours: list(map(tuple, theirs.get_ranks(name))) for ours, name in names.items()}


def test_groups_of_200_random_layouts_and_orders_are_equal() -> None:
    with_experts = 0
    for layout in random_layouts(200):
        assert {n: layout.groups(n) for n in DENSE} == their_groups(layout, DENSE, False), layout
        stages = [layout.ranks_of_pipeline_rank(stage) for stage in range(layout.pp)]
        pipelines = list(zip(*stages, strict=True))
        assert sorted(pipelines) == sorted(layout.groups("pp")), layout
        assert layout.groups("embedding") == [
            tuple(parallel_state.default_embedding_ranks(ranks)) for ranks in layout.groups("pp")
        ]
        if "ep" in layout.group_names:
            ours = {name: layout.groups(name) for name in EXPERT}
            assert ours == their_groups(layout, EXPERT, True), layout
            with_experts += layout.has_expert_parallelism
    assert with_experts > 40


def test_layouts_that_we_refuse_are_refused_by_megatron() -> None:
    """Checks that dense layers and experts need equal pipeline groups, as megatron-core asserts."""
    with pytest.raises(LayoutError, match="put pp last"):
        ParallelLayout(cp=2, ep=4, dp=4, pp=2, order="cp-pp-ep-tp-dp")
    dense = parallel_state.RankGenerator(1, 1, 4, 2, 2, "cp-pp-ep-tp-dp")
    expert = parallel_state.RankGenerator(1, 4, 2, 2, 1, "cp-pp-ep-tp-dp")
    assert dense.get_ranks("pp") != expert.get_ranks("pp")
