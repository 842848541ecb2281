"""Plans of schedules: equal to torch's, checked by hand against figures of papers, or refused."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_parallel import LayoutError, ParallelLayout
from megatron_parallel.pipeline import (
    SCHEDULES,
    check_micro_batches,
    check_schedule,
    default_schedule,
    find_schedule_kind,
    planned_action_groups,
    planned_actions,
    simulate,
)


def order(schedule: str, pp: int, rank: int, micro_batches: int) -> str:
    return " ".join(map(str, planned_actions(schedule, pp, rank, micro_batches)))


def test_1f1b_warms_up_and_then_alternates() -> None:
    assert order("1f1b", 2, 0, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order("1f1b", 2, 1, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order("1f1b", 4, 2, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"


def test_1f1b_runs_fewer_micro_batches_than_ranks_in_the_order_of_gpipe() -> None:
    for rank in range(4):
        assert order("1f1b", 4, rank, 1) == "F0 B0"
        assert order("1f1b", 4, rank, 3) == "F0 F1 F2 B0 B1 B2"
    assert order("1f1b", 4, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert order("gpipe", 2, 1, 3) == "F0 F1 F2 B0 B1 B2"


def test_combined_1f1b_is_further_ahead_and_then_runs_pairs() -> None:
    def groups(pp: int, rank: int, count: int, vpp: int = 1) -> str:
        plan = planned_action_groups("combined-1f1b", pp, rank, count, vpp)
        return " ".join("+".join(map(str, turn)) for turn in plan)

    assert groups(1, 0, 3) == "F0 F1+B0 F2+B1 B2"
    assert groups(2, 0, 5) == "F0 F1 F2 F3+B0 F4+B1 B2 B3 B4"
    assert groups(2, 1, 5) == "F0 F1+B0 F2+B1 F3+B2 F4+B3 B4"
    assert groups(2, 0, 2) == "F0 F1 B0 B1"
    assert groups(2, 1, 2, 2) == "F0 F1 F0 F1+B0 B1 B0 B1"
    for pp, vpp, count in ((2, 2, 8), (4, 3, 8), (3, 2, 6)):
        for rank in range(pp):  # as interleaved 1F1B with one more forward pass at the beginning
            plain = planned_actions("interleaved-1f1b", pp, rank, count, vpp)
            ours = planned_actions("combined-1f1b", pp, rank, count, vpp)
            for kind in "FB":
                assert [a for a in ours if a.kind == kind] == [a for a in plain if a.kind == kind]
            ahead = [p.index(next(a for a in p if a.kind == "B")) for p in (ours, plain)]
            assert ahead[0] - ahead[1] in (0, 1)


def test_interleaved_1f1b_runs_groups_of_a_given_size() -> None:
    """The example in Megatron-LM's description of `microbatch_group_size_per_vp_stage`."""

    def forward(rank: int, count: int, group_size: int) -> str:
        plan = planned_actions("interleaved-1f1b", 2, rank, count, 2, group_size)
        return " ".join(str(a.micro_batch) for a in plan if a.kind == "F")

    for rank in range(2):
        assert forward(rank, 4, 2) == "0 1 0 1 2 3 2 3"
        assert forward(rank, 5, 3) == "0 1 2 0 1 2 3 4 3 4"
    # The default: as many equal groups as possible.
    for count in (2, 3, 4, 6, 8):
        length = count // (count // 2)
        assert planned_actions("interleaved-1f1b", 2, 0, count, 2) == planned_actions(
            "interleaved-1f1b", 2, 0, count, 2, length
        )


def test_groups_are_simulated_and_cost_memory() -> None:
    short, long = (simulate("interleaved-1f1b", 2, 8, 2, group_size=size) for size in (2, 4))
    assert short.end == long.end and max(long.peak_in_flight) > max(short.peak_in_flight)


def test_zero_bubble_puts_weight_gradients_where_1f1b_waits() -> None:
    assert order("zero-bubble", 2, 0, 3) == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert order("zero-bubble", 2, 1, 3) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved-1f1b", 4, 2, 8, 3), "group_size=3 is less than pp=4.* use at least 4"),
        (("interleaved-1f1b", 2, 2, 2, 3), "cannot run 2 micro-batches, fewer than one group"),
        (("interleaved-1f1b", 4, 2, 11, 5), "the last group has 1, .* use 10 or 14 micro-batches"),
        (("looped-bfs", 2, 2, 8, 4), "group_size=4 needs schedule 'interleaved-1f1b' or 'comb"),
        (("combined-1f1b", 2, 1, 8, 4), "group_size=4 needs .* with vpp=1; leave it out"),
        (("1f1b", 2, 1, 0), "0 micro-batches: use at least 1 per step"),
        (("interleaved-1f1b", 4, 2, 9), r"cannot run 9 micro-batches: 9 // 4 = 2 .* use 8 or 10"),
        (("zero-bubble", 4, 1, 9), r"cannot run 9 micro-batches: 9 // 4 = 2 .* use 8 or 10"),
        (("combined-1f1b", 4, 2, 9), r"cannot run 9 micro-batches: 9 // 4 = 2 .* use 8 or 10"),
        (("combined-1f1b", 1, 1, 1), "cannot run 1 micro-batch: .* messages .* at least 2"),
        (("dualpipe-v", 4, 2, 7), r"cannot run 7 micro-batches: .* its 2 x 4 = 8 stages"),
        (
            ("1f1b", 4, 2, 8),
            "does not support vpp=2: it needs 1 chunk per rank; .*'interleaved-1f1b'",
        ),
        (("interleaved-1f1b", 4, 1, 8), "does not support vpp=1"),
        (("zb-v", 4, 3, 8), "does not support vpp=3: it needs exactly 2 chunks"),
        (("2f2b", 4, 1, 8), "unknown schedule '2f2b': use one of gpipe, 1f1b"),
    ],
)
def test_numbers_that_a_schedule_cannot_run_are_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_micro_batches(*arguments)


def test_the_counts_that_a_refusal_proposes_are_accepted() -> None:
    for count in (8, 10, 3, 4):
        check_micro_batches("interleaved-1f1b", 4, 2, count)
    for count in (10, 14):
        check_micro_batches("interleaved-1f1b", 4, 2, count, 5)


def test_a_schedule_needs_its_stage_mapping() -> None:
    with pytest.raises(LayoutError, match=r"'zb-v' needs ParallelLayout\(stage_mapping='v'\)"):
        check_schedule("zb-v", 2, "loop")
    with pytest.raises(LayoutError, match=r"'zero-bubble' needs .*stage_mapping='loop'"):
        check_schedule("zero-bubble", 2, "v")
    layouts = ParallelLayout(pp=2), ParallelLayout(pp=2, vpp=2)
    v = ParallelLayout(pp=2, vpp=2, stage_mapping="v")
    assert [default_schedule(x) for x in (*layouts, v)] == ["1f1b", "interleaved-1f1b", "zb-v"]


def torchs_plan(name: str, pp: int, vpp: int, micro_batches: int) -> list[list[tuple[Any, ...]]]:
    """Returns the passes of each rank by torch's schedule of that name."""
    from torch.distributed.pipelining import schedules

    classes = {
        "gpipe": schedules.ScheduleGPipe,
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "looped-bfs": schedules.ScheduleLoopedBFS,
        "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zb-v": schedules.ScheduleZBVZeroBubble,
        "dualpipe-v": schedules.ScheduleDualPipeV,
    }
    facts = {"num_stages": pp * vpp, "group_size": pp, "group_rank": 0, "submod": None}
    stages: Any = [SimpleNamespace(stage_index=i * pp, is_last=False, **facts) for i in range(vpp)]
    made: Any = classes[name](stages[0] if name == "gpipe" else stages, micro_batches, loss_fn=len)
    return [
        [
            (each.computation_type.value, each.stage_index, each.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None
            for each in action.sub_actions or (action,)
            if each.computation_type.value in "FBIW"
        ]
        for rank in range(pp)
    ]


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("1f1b", "combined-1f1b")])
def test_plans_and_refusals_equal_those_of_torch(name: str) -> None:
    """Skips 1F1B, for which torch has no plan (see test_pipeline), and our combined 1F1B."""
    compared = refused = 0
    for pp in (2, 3, 4):
        for vpp in filter(find_schedule_kind(name).supports, (1, 2, 3)):
            for count in range(1, 11):
                try:
                    check_micro_batches(name, pp, vpp, count)
                except LayoutError:
                    refused += 1
                    with pytest.raises(ValueError, match="micro"):
                        torchs_plan(name, pp, vpp, count)
                    continue
                for rank, wanted in enumerate(torchs_plan(name, pp, vpp, count)):
                    assert planned_actions(name, pp, rank, count, vpp) == wanted
                    split = any(kind == "W" for kind, *_ in wanted)
                    assert find_schedule_kind(name).splits_backward == split
                    compared += 1
    assert compared > 30
    assert (refused > 0) == (name in ("interleaved-1f1b", "zero-bubble", "dualpipe-v"))


def test_splits_plans_and_pictures_import_no_torch() -> None:
    code = (
        "import sys; from megatron_parallel.pipeline import draw_picture, draw_schedule; "
        "from megatron_parallel.pipeline import simulate, split_layers; "
        "draw_schedule('zb-v', 2, 4, 2); draw_picture(simulate('dualpipe-v', 2, 4, 2)).svg(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
