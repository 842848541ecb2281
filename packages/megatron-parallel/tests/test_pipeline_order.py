"""Plans of schedules, and their picture."""

import subprocess
import sys

import pytest
from megatron_parallel import LayoutError
from megatron_parallel.pipeline import check_micro_batches, draw, planned_actions


def order(schedule: str, stages: int, stage: int, micro_batches: int) -> str:
    return " ".join(map(str, planned_actions(schedule, stages, stage, micro_batches)))


def test_1f1b_warms_up_and_then_alternates() -> None:
    assert order("1f1b", 2, 0, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order("1f1b", 2, 1, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_1f1b_runs_fewer_micro_batches_than_stages() -> None:
    assert order("1f1b", 4, 0, 2) == "F0 F1 B0 B1"
    assert order("1f1b", 4, 3, 2) == "F0 B0 F1 B1"
    assert order("1f1b", 4, 1, 1) == "F0 B0"


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert order("gpipe", 2, 1, 3) == "F0 F1 F2 B0 B1 B2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 2, 1, 0), "0 micro-batches: a step needs at least 1"),
        (("interleaved-1f1b", 4, 2, 9), r"cannot run 9 micro-batches: 9 // 4 = 2 .* use 8 or 10"),
        (("1f1b", 4, 2, 8), "does not fit vpp=2"),
        (("interleaved-1f1b", 4, 1, 8), "does not fit vpp=1"),
        (("2f2b", 4, 1, 8), "no schedule is called '2f2b': there are 1f1b, gpipe"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused_with_its_numbers(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        check_micro_batches(*arguments)


def test_the_counts_that_a_refusal_proposes_are_accepted() -> None:
    for count in (8, 10, 3, 4):
        check_micro_batches("interleaved-1f1b", 4, 2, count)


def test_a_schedule_can_be_drawn() -> None:
    assert draw("1f1b", 2, 3).splitlines()[:2] == [
        "stage 0 | F0 F1  .  . B0--- F2 B1---  . B2--- |",
        "stage 1 |  . F0 B0--- F1 B1--- F2 B2---  .  . |",
    ]
    picture = draw("1f1b", 3, 4)
    rows = picture.splitlines()[:-1]
    assert len({len(row) for row in rows}) == 1
    for stage, row in enumerate(rows):
        names = [word.strip("-") for word in row.split("|")[1].split() if word != "."]
        assert " ".join(names) == order("1f1b", 3, stage, 4)
    assert picture.endswith("idle 33%; micro-batches alive at most, by stage: 3, 2, 1")


def test_splits_and_plans_import_no_torch() -> None:
    code = (
        "import sys; from megatron_parallel.pipeline import draw, split_layers; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_idle_part_is_the_formula_of_the_papers() -> None:
    for schedule in ("1f1b", "gpipe"):
        for stages, count in ((2, 4), (4, 8), (4, 2)):
            idle = (stages - 1) / (count + stages - 1)
            assert f"idle {idle:.0%};" in draw(schedule, stages, count)
