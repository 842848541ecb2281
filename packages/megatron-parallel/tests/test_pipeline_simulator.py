"""Simulated schedules equal the formulas of the papers, and their pictures."""

import xml.etree.ElementTree as ET
from fractions import Fraction
from itertools import pairwise

import pytest
from megatron_parallel import LayoutError
from megatron_parallel.pipeline import (
    SCHEDULES,
    PassDurations,
    draw_picture,
    draw_schedule,
    find_schedule_kind,
    planned_actions,
    simulate,
)

ALL = [
    (name, vpp) for name in SCHEDULES for vpp in (1, 2, 3) if find_schedule_kind(name).supports(vpp)
]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (4, 2), (8, 32), (3, 1)])
def test_the_bubble_of_gpipe_and_1f1b(schedule: str, pp: int, count: int) -> None:
    for times in (PassDurations(), PassDurations(1, 1), PassDurations(0.3, 0.7)):
        timeline = simulate(schedule, pp, count, times=times)
        assert timeline.bubble_fraction == Fraction(pp - 1, count + pp - 1)
    as_gpipe = schedule == "gpipe" or count < pp
    alive = [count] * pp if as_gpipe else [pp - rank for rank in range(pp)]
    assert list(timeline.peak_in_flight) == alive


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_the_bubble_of_chunks_is_smaller_by_their_number(pp: int, vpp: int, count: int) -> None:
    """Narayanan et al. 2021: (p - 1) / (v m) of the ideal time; Lamy-Poirier 2022: the same."""
    for schedule in ("interleaved-1f1b", "looped-bfs"):
        for times in (PassDurations(), PassDurations(1, 1)):
            timeline = simulate(schedule, pp, count, vpp, times)
            assert timeline.bubble_fraction == Fraction(pp - 1, vpp * count + pp - 1)


@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 4), (4, 8), (8, 32), (3, 2)])
def test_pairs_keep_the_bubble_and_double_the_micro_batches_in_flight(pp: int, count: int) -> None:
    for times in (PassDurations(), PassDurations(1, 1), PassDurations(0.3, 0.7)):
        combined = simulate("combined-1f1b", pp, count, times=times)
        assert combined.bubble_fraction == Fraction(pp - 1, count + pp - 1)
        if pp > 1:
            chunks = simulate("combined-1f1b", pp, count, 2, times)
            assert (
                chunks.bubble_fraction
                == simulate("interleaved-1f1b", pp, count, 2, times).bubble_fraction
            )
    assert list(combined.peak_in_flight) == [min(count, 2 * (pp - rank)) for rank in range(pp)]


def test_a_pair_needs_both_inputs_and_gives_both_results_when_it_is_done() -> None:
    timeline = simulate("combined-1f1b", 2, 5)
    ends = {event.action: event.end for events in timeline.ranks for event in events}
    starts = {event.action: event.start for events in timeline.ranks for event in events}
    assert starts["F", 0, 3] >= ends["B", 1, 0] == ends["F", 1, 1] + 2
    assert [e.action for e in timeline.ranks[1] if e.overlapped] == [("B", 1, i) for i in range(4)]
    assert draw_schedule("combined-1f1b", 2, 3).splitlines()[:2] == [
        "rank 0 | F0 F1 F2  .  . B0---  . B1--- B2--- |",
        "rank 1 |  . F0 F1+B0--- F2+B1--- B2---  .  . |",
    ]


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (8, 16)])
def test_the_bubble_of_zero_bubble_schedules(pp: int, count: int) -> None:
    """Qi et al. 2023, table 2: ZB-H1 wastes (p - 1)(F + I - W); ZB-V nothing if all are equal."""
    for times, wasted in (
        (PassDurations(), 1),
        (PassDurations(1, 2.5, 1), 1.5),
        (PassDurations(2, 3, 1), 3),
    ):
        timeline = simulate("zero-bubble", pp, count, times=times)
        assert timeline.end - count * (
            timeline.times.exact_durations["F"] + timeline.times.exact_durations["B"]
        ) == (Fraction(pp - 1) * Fraction(str(wasted)))
    v = simulate("zb-v", pp, count, 2)
    assert set(v.stall_times) == {0}
    assert v.end == 6 * count + pp - 1  # the last rank begins pp - 1 forward passes later
    assert max(v.peak_in_flight) == pp  # as 1F1B, on all ranks
    assert (
        simulate("dualpipe-v", pp, count, 2).bubble_fraction
        <= simulate("1f1b", pp, count).bubble_fraction / 2
    )


@pytest.mark.parametrize(("schedule", "vpp"), ALL)
def test_a_simulation_runs_the_plan_in_a_possible_order(schedule: str, vpp: int) -> None:
    times = PassDurations(1, 1.5, send=0.25)
    timeline = simulate(schedule, 3, 6, vpp, times)
    ends = {}
    for rank, events in enumerate(timeline.ranks):
        assert [event.action for event in events] == planned_actions(schedule, 3, rank, 6, vpp)
        assert all(one.end <= other.start for one, other in pairwise(events))
        ends |= {event.action: event.end for event in events}
    for event in (event for events in timeline.ranks for event in events):
        kind, stage, i = event.action
        if kind == "F" and stage:
            assert ends["F", stage - 1, i] <= event.start
        elif kind in "BI" and stage < 3 * vpp - 1:
            assert min(ends[k, stage + 1, i] for k in "BI" if (k, stage + 1, i) in ends) <= (
                event.start
            )
        elif kind == "W":
            assert ends["I", stage, i] <= event.start


def test_sending_takes_time_between_ranks_only() -> None:
    """Down two borders, through the bottom of the V without sending, up two, and back again."""
    timeline = simulate("zb-v", 3, 1, 2, PassDurations(1, 2, send=10))
    down_and_up = 6 * 1 + 4 * 10
    weights = 2 * 1  # weight halves of the bottom's upper stage and of the first stage
    assert timeline.end == 2 * down_and_up + weights


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward": 0}, "forward=0: use a duration above 0"),
        ({"send": -1}, "send=-1 is negative"),
        ({"weight": 2}, "weight=2 is not between 0 and backward=2"),
    ],
)
def test_impossible_durations_are_refused(times: dict[str, float], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PassDurations(**times)


def test_a_schedule_can_be_drawn_as_text() -> None:
    assert draw_schedule("1f1b", 2, 3).splitlines()[:2] == [
        "rank 0 | F0 F1  .  . B0--- F2 B1---  . B2--- |",
        "rank 1 |  . F0 B0--- F1 B1--- F2 B2---  .  . |",
    ]
    text = draw_schedule("1f1b", 3, 4)
    rows = text.splitlines()[:-1]
    assert len({len(row) for row in rows}) == 1
    for rank, row in enumerate(rows):
        names = [word.strip("-") for word in row.split("|")[1].split() if word != "."]
        assert names == [str(action) for action in planned_actions("1f1b", 3, rank, 4)]
    assert text.endswith("bubble 33.3%; in-flight micro-batches at most, by rank: 3, 2, 1")
    assert "rank 0 | F0a F1a F2a F0b I0b W0b" in draw_schedule("zb-v", 2, 4, 2)
    with pytest.raises(LayoutError, match=r"units of 0\.001 exceed the 4000"):
        draw_schedule("1f1b", 2, 3, times=PassDurations(1, 2.001))


@pytest.mark.parametrize(("schedule", "vpp"), ALL)
def test_a_picture_shows_every_pass_once_and_none_over_another(schedule: str, vpp: int) -> None:
    timeline = simulate(schedule, 3, 6, vpp)
    drawn = draw_picture(timeline)
    for rank, events in enumerate(timeline.ranks):
        row = [box for box in drawn.boxes if box.y == drawn.boxes[0].y + 36 * rank]
        assert len(row) == len(events) + 1  # the idle background
        assert all(one.x + one.width <= other.x for one, other in pairwise(row[1:]))
        assert row[0].x + row[0].width >= row[-1].x + row[-1].width
    svg = ET.fromstring(drawn.svg())
    words = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 2", "forward", "5"} <= set(words)
