"""What schedules run and refuse, evaluations, sums of a loss and the comparison of steps."""

from typing import Any

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.pipeline import (
    SCHEDULES,
    PipelineConfig,
    check_micro_batches,
    find_schedule_kind,
    planned_actions,
)
from megatron_parallel.pipeline import comparison as comparison_module
from megatron_parallel.pipeline.comparison import StepComparison
from megatron_parallel.pipeline.objective import Objective
from megatron_parallel.pipeline.order import planned_forward_actions
from megatron_parallel.pipeline.rules import check_group_size, effective_schedule

KINDS = {
    # name: chunks that it supports of 1, 2 and 3; V; splits; equal rounds; groups; overlaps
    "gpipe": ("1", "loop", "----"),
    "1f1b": ("1", "loop", "----"),
    "interleaved-1f1b": ("23", "loop", "-rg-"),
    "combined-1f1b": ("123", "loop", "-rgo"),
    "looped-bfs": ("123", "loop", "----"),
    "zero-bubble": ("123", "loop", "sr--"),
    "zb-v": ("2", "v", "s---"),
    "dualpipe-v": ("2", "v", "s---"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_properties_of_schedules_are_those_of_their_papers(name: str) -> None:
    chunks, mapping, letters = KINDS[name]
    kind = find_schedule_kind(name)
    assert "".join(str(vpp) for vpp in (1, 2, 3) if kind.supports(vpp)) == chunks
    found = (
        kind.splits_backward,
        kind.needs_equal_rounds,
        kind.takes_group_size,
        kind.overlaps_passes,
    )
    assert (kind.stage_mapping, found) == (mapping, tuple(letter != "-" for letter in letters))
    assert list(KINDS) == list(SCHEDULES)


@pytest.mark.parametrize(
    "arguments",
    [
        ("1f1b", 4, 1, 1),
        ("gpipe", 1, 1, 1),
        ("zb-v", 4, 2, 1),
        ("dualpipe-v", 4, 2, 8),
        ("dualpipe-v", 1, 2, 1),  # one rank runs a loop
        ("combined-1f1b", 4, 1, 9),  # one chunk needs no rounds
        ("combined-1f1b", 4, 2, 2),
        ("zero-bubble", 4, 1, 3),
        ("interleaved-1f1b", 4, 2, 10),
        ("interleaved-1f1b", 4, 2, 4, 4),
        ("interleaved-1f1b", 4, 2, 9, 5),  # a last group of 4
        ("combined-1f1b", 2, 2, 10, 5),
    ],
    ids=str,
)
def test_numbers_that_just_fit_are_run(arguments: tuple[Any, ...]) -> None:
    check_micro_batches(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 1, 4), "0 pipeline ranks: use at least 1"),
        (("1f1b", 2, 1, -1), "-1 micro-batches: use at least 1 per step"),
        (("dualpipe-v", 2, 2, 3), "2 x 2 = 4 stages"),
        (("interleaved-1f1b", 4, 2, 8, 3), "group_size=3 is less than pp=4.* use at least 4"),
        (("interleaved-1f1b", 4, 2, 8, 5), "the last group has 3, .* use 5 or 9 micro-batches"),
        (("interleaved-1f1b", 4, 2, 4, 5), "use at least 5, or smaller groups"),
        (("interleaved-1f1b", 2, 2, 5), "5 // 2 = 2 rounds must have equal lengths; use 4 or 6"),
        (("interleaved-1f1b", 4, 2, 13), "13 // 4 = 3 rounds must .* use 12 or 15"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_micro_batches(*arguments)


def test_groups_need_several_chunks_of_a_schedule_in_rounds() -> None:
    check_group_size("interleaved-1f1b", 4, 2, 4)
    check_group_size("combined-1f1b", 4, 3, 9)
    for schedule, vpp in (("zero-bubble", 2), ("combined-1f1b", 1)):
        with pytest.raises(LayoutError, match=rf"not '{schedule}' with vpp={vpp}; leave it out"):
            check_group_size(schedule, 2, vpp, 4)


def test_ranks_outside_of_a_pipeline_have_no_plan() -> None:
    for rank in (-1, 2):
        with pytest.raises(LayoutError, match=f"rank {rank} does not exist: .* has 2 ranks"):
            planned_actions("1f1b", 2, rank, 4)
    assert effective_schedule("1f1b", 4, 3) == "gpipe"
    assert effective_schedule("1f1b", 4, 4) == "1f1b"
    assert effective_schedule("zero-bubble", 4, 3) == "zero-bubble"


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("gpipe", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1)]
)
def test_one_rank_runs_a_loop(schedule: str, vpp: int) -> None:
    plan = planned_actions(schedule, 1, 0, 3, vpp)
    assert plan == [(kind, 0, i) for i in range(3) for kind in "FB"]


def test_an_evaluation_runs_each_micro_batch_forward_through_each_chunk() -> None:
    for pp, v, stages in ((2, False, ((0, 2), (1, 3))), (2, True, ((0, 3), (1, 2)))):
        for rank, own in enumerate(stages):
            for count in (1, 3):
                plan = planned_forward_actions(pp, rank, count, 2, v)
                assert {action.kind for action in plan} == {"F"}
                for stage in own:
                    numbers = [a.micro_batch for a in plan if a.stage == stage]
                    assert numbers == list(range(count))
                assert len(plan) == 2 * count
    # Looped: all micro-batches through one chunk, then the next.
    assert [a.stage for a in planned_forward_actions(2, 1, 3, 2, False)] == [1, 1, 1, 3, 3, 3]


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"group_size": 4}, "group_size=4"),
        ({"last": 0}, "last=0"),
        ({"count_loss": True}, "count_loss=True"),
        ({"stages": "EtL"}, "stages=EtL"),
        ({"overlap_experts": True, "count_embedding": True}, "count_embedding=True"),
    ],
)
def test_settings_without_a_pipeline_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(LayoutError, match=f"^{field} needs a pipeline of at least 2 ranks"):
        PipelineConfig(**settings).resolve_layout(ParallelLayout())


def test_settings_of_a_pipeline_are_checked_and_applied() -> None:
    chunks = ParallelLayout(pp=2, vpp=2)
    assert PipelineConfig(group_size=2).resolve_layout(chunks) == chunks
    with pytest.raises(LayoutError, match="group_size=1 is less than pp=2"):
        PipelineConfig(group_size=1).resolve_layout(chunks)
    v = ParallelLayout(pp=2, vpp=2, stage_mapping="v")
    for name in ("first", "last"):
        with pytest.raises(LayoutError, match="first and last have no effect: use stages"):
            PipelineConfig(**{name: 0}).stage_layers(4, v)
    assert [len(own) for own in PipelineConfig(count_loss=True).stage_layers(3, v)] == [1, 1, 1, 0]
    sizes = PipelineConfig(stages="Et|tmL").stage_layers(2, ParallelLayout(pp=2), 1)
    assert sizes == (range(1), range(1, 2))


# -- the loss ----------------------------------------------------------------------------------


def objective(*names: str) -> Objective:
    def loss(output: torch.Tensor, batch: float) -> dict[str, torch.Tensor]:
        return {name: output * batch * (number + 1) for number, name in enumerate(names)}

    return Objective(loss, names, torch.device("cpu"))


def test_sums_add_up_in_float64_and_begin_at_zero() -> None:
    made = objective("loss", "tokens")
    for _ in range(2):
        made.begin({"loss": 4.0})
        output = torch.tensor(2.0**-20, dtype=torch.float32, requires_grad=True)
        parts = [made.add(output + 2.0, 1.0), made.add(output, 1.0)]
        assert made.totals.dtype == torch.float64 and not made.totals.requires_grad
        assert made.totals.tolist() == [2.0 + 2 * 2.0**-20, 4.0 + 4 * 2.0**-20]
        assert [part.item() for part in parts] == [(2.0 + 2.0**-20) / 4, 2.0**-22]
        assert parts[0].requires_grad


def test_denominators_keep_the_dtype_of_a_sum() -> None:
    made = objective("loss", "other")
    below = torch.tensor(2.0, dtype=torch.float64)
    made.begin({"loss": below, "other": 8})
    term = made.add(torch.tensor(3.0, dtype=torch.bfloat16), 1.0)
    assert term.dtype == torch.bfloat16 and term.item() == 3.0 / 2 + 6.0 / 8
    made.begin({})
    assert made.add(torch.tensor(3.0), 1.0).item() == 0.0  # an evaluation differentiates nothing
    assert made.totals.tolist() == [3.0, 6.0]


# -- the comparison of steps -------------------------------------------------------------------


@pytest.mark.parametrize("equal", [True, False])
def test_steps_that_differ_are_compared_in_words_once(
    monkeypatch: pytest.MonkeyPatch, equal: bool
) -> None:
    agreed: list[tuple[Any, ...]] = []
    mesh = Mesh(ParallelLayout(pp=2, dp=1), 0)
    monkeypatch.setattr(
        mesh, "agree", lambda topic, values, axis: agreed.append((topic, values, axis))
    )
    gathered: list[torch.Tensor] = []

    def gather(own: torch.Tensor, axis: Any, *, purpose: str) -> torch.Tensor:
        assert (axis.name, purpose, own.dtype, own.shape) == (
            "pp",
            "step digest",
            torch.int64,
            (1,),
        )
        gathered.append(own)
        return torch.cat([own, own + (0 if equal else 1)])

    monkeypatch.setattr(comparison_module, "all_gather", gather)
    compared = StepComparison(mesh)
    compared.check()
    compared.finish()
    assert not agreed and not gathered
    for number in (1, 2, 2):
        compared.start({"number": str(number)})
        compared.check()
        compared.finish()
    words = [("pipeline steps", {"number": number}, "pp") for number in "122"]
    assert agreed == ([] if equal else words)
    assert not torch.equal(gathered[0], gathered[1]) and torch.equal(gathered[1], gathered[2])


def test_a_result_that_has_not_arrived_is_waited_for_by_finish_alone(single: Mesh) -> None:
    class Late:
        arrived, reads = False, 0

        def read(self) -> torch.Tensor:
            Late.reads += 1
            return torch.tensor(False)

    compared = StepComparison(single)
    compared._differs = Late()  # type: ignore[assignment]
    compared.check()
    assert Late.reads == 0
    compared.finish()
    compared.finish()
    assert Late.reads == 1
