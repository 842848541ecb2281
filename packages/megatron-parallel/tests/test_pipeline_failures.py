"""Stages that disagree, and ranks that raise, die or freeze, end all ranks with one line each."""

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parallel import LayoutError, Mesh, ParallelLayout
from megatron_parallel.pipeline import PeerError, PipelineEngine, TensorSpec
from megatron_parallel.pipeline.comparison import StepComparison
from megatron_parallel.testing import Rank, WorkerError, WorkerPool
from torch import Tensor, nn
from waiting import HANG, Answers

SECONDS = 2.0
Batch = Tensor
Trouble = Callable[[int, int], None]


class Chunk(nn.Module):
    """A linear layer that calls `trouble` before each forward pass."""

    def __init__(self, rank: int, trouble: Trouble) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rank, self.trouble, self.passes = rank, trouble, 0

    def forward(self, x: Tensor) -> Tensor:
        self.trouble(self.rank, self.passes)
        self.passes += 1
        result: Tensor = self.linear(x)
        return result


def no_trouble(rank: int, passes: int) -> None:
    pass


def inputs(batch: Batch, stage: int) -> dict[str, Any]:
    return {"x": batch} if stage == 0 else {}


def stage_output_spec(batch: Batch, stage: int) -> TensorSpec:
    return TensorSpec(tuple(batch.shape), batch.dtype)


def loss(output: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {"loss": output.sum()}


def step(
    rank: Rank, layout: ParallelLayout, trouble: Trouble = no_trouble, **options: Any
) -> tuple[str, str, float]:
    """Run two steps on a mesh with a short time-out; returns what was raised.

    And after how many seconds, which are `SECONDS` at least where a rank froze.
    """
    Mesh.bind(layout, timeout=timedelta(seconds=60)).close()  # all have imported what they need
    mesh = Mesh.bind(layout, timeout=timedelta(seconds=SECONDS))
    chunks = [Chunk(rank.rank, trouble) for _ in range(layout.vpp)]
    sizes = options.pop("sizes", [2] * 4)
    sums = options.get("sums", ("loss",))
    engine = PipelineEngine(
        mesh,
        chunks,
        **{"loss": loss, "inputs": inputs, "stage_output_spec": stage_output_spec} | options,
    )
    started = time.monotonic()
    try:
        for _ in range(2):
            started = time.monotonic()
            engine.run([torch.ones(size, 4) for size in sizes], dict.fromkeys(sums, 8.0))
    except BaseException as error:  # noqa: BLE001 - the test checks it
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def test_stages_that_disagree_on_shapes_are_named_before_anything_is_sent(
    worker_pool: WorkerPool,
) -> None:
    def disagree(rank: Rank) -> Any:
        return step(rank, ParallelLayout(pp=2, dp=1), sizes=[2, 2] if rank.rank == 0 else [3, 3])

    answers = worker_pool.run(disagree, ranks=2)
    assert {kind for kind, _, _ in answers} == {LayoutError.__name__}
    for _, line, _ in answers:
        assert line == (
            "ranks disagree on what stage 0 passes to stage 1: "
            "rank 0: [2, 4] float32; rank 1: [3, 4] float32"
        )


@pytest.mark.parametrize(("late", "steps"), [(2, 1), (1000, 2)], ids=["passes", "next step"])
def test_a_comparison_that_arrives_late_is_read_before_the_next_pass_or_step(
    worker_pool: WorkerPool, late: int, steps: int
) -> None:
    """Steps that differ in a name only exchange equal messages, so Gloo does not fail first."""

    def disagree(rank: Rank) -> Any:
        from megatron_parallel import HostCopy
        from megatron_parallel.pipeline import comparison

        looks, runs = [], []

        class Late(HostCopy):
            @property
            def arrived(self) -> bool:
                looks.append(1)
                return len(looks) > late

        def trouble(number: int, passes: int) -> None:
            runs.append(passes)

        name = f"loss{rank.rank}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comparison, "HostCopy", Late)
            found = step(
                rank,
                ParallelLayout(pp=2, dp=1),
                trouble,
                sums=(name,),
                loss=lambda output, batch: {name: output.sum()},
            )
        return found, len(runs)

    line = "ranks disagree on the sums of the loss: rank 0: loss0; rank 1: loss1"
    for (kind, text, _), runs in worker_pool.run(disagree, ranks=2):
        assert (kind, text) == ("LayoutError", line)
        assert runs == 4 if steps == 2 else runs < 4


@pytest.mark.gpu
def test_the_comparison_of_steps_is_not_waited_for(
    device: torch.device, device_waits: Callable[[], AbstractContextManager[Counter[str]]]
) -> None:
    comparison = StepComparison(Mesh.single(device))
    with device_waits() as waits:
        for number in range(3):
            comparison.finish()
            comparison.start({"the number of the step": str(number)})
            for _ in range(200):  # passes
                torch.ones(2, device=device).add_(1)
            comparison.check()
    assert waits == Counter()


def test_only_the_ranks_of_one_pipeline_have_to_agree(worker_pool: WorkerPool) -> None:
    def other_lengths(rank: Rank) -> Any:
        size = 2 if rank.rank % 2 == 0 else 5  # stages of one pipeline are two ranks apart
        return step(rank, ParallelLayout(pp=2, dp=2), sizes=[size] * 3)

    assert [kind for kind, _, _ in worker_pool.run(other_lengths, ranks=4)] == [""] * 4


def test_counts_of_micro_batches_that_differ_are_named(worker_pool: WorkerPool) -> None:
    def disagree(rank: Rank) -> Any:
        return step(rank, ParallelLayout(pp=2, dp=1), sizes=[2] * (3 + rank.rank))

    for kind, line, _ in worker_pool.run(disagree, ranks=2):
        assert kind == "LayoutError"
        assert line == "ranks disagree on the number of micro-batches: rank 0: 3; rank 1: 4"


def test_unequal_micro_batches_of_one_step_are_refused(worker_pool: WorkerPool) -> None:
    def unequal(rank: Rank) -> Any:
        return step(rank, ParallelLayout(pp=2, dp=1), sizes=[2, 2, 3])

    for kind, line, _ in worker_pool.run(unequal, ranks=2):
        assert kind == "LayoutError"
        assert "sends [2, 4] float32 for micro-batch 0 but [3, 4] float32 for micro-batch 2" in line


def test_an_output_that_does_not_match_its_spec_is_not_sent(worker_pool: WorkerPool) -> None:
    def wrong(rank: Rank) -> Any:
        return step(
            rank,
            ParallelLayout(pp=2, dp=1),
            stage_output_spec=lambda batch, stage: TensorSpec((7, 4), batch.dtype),
        )

    with pytest.raises(WorkerError) as failed:
        worker_pool.run(_ends_with_its_error, wrong, ranks=2)
    assert (
        "stage 0 of 2 returns [2, 4] float32 for micro-batch 0, but stage 1 expects [7, 4] float32"
    ) in str(failed.value)


def test_other_ranks_quote_a_rank_that_raises(worker_pool: WorkerPool) -> None:
    def trouble(rank: int, passes: int) -> None:
        if (rank, passes) == (1, 2):
            raise ValueError("the layer\nis broken")

    def run(rank: Rank) -> Any:
        return step(rank, ParallelLayout(pp=2, dp=1), trouble)

    (kind0, line0, _), (kind1, line1, _) = worker_pool.run(run, ranks=2)
    assert (kind1, line1) == ("ValueError", "the layer\nis broken")
    assert kind0 == PeerError.__name__
    assert line0 == ("rank 1 raised ValueError: the layer is broken; rank 0 waited for rank 1")


def test_a_rank_that_freezes_is_named_after_the_time_out(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    given = Answers(tmp_path)

    def trouble(rank: int, passes: int) -> None:
        if (rank, passes) == (1, 4):
            given.wait_for([0])

    def run(rank: Rank) -> Any:
        answer = step(rank, ParallelLayout(pp=2, dp=1), trouble)
        given.give(rank.rank)
        return answer

    (kind, line, seconds), (_, other, _) = worker_pool.run(run, ranks=2, timeout=HANG)
    assert kind == "PeerError"
    assert line.startswith("rank 1 (stage 1 of 2) did not ")
    assert "on axis 'pp'" in line and "micro-batch" in line and "\n" not in line
    assert seconds > SECONDS - 1
    assert other == f"{line}; rank 1 waited for rank 0"  # when it is back


def test_the_others_name_a_rank_whose_process_ends(patient: WorkerPool) -> None:
    def trouble(rank: int, passes: int) -> None:
        if (rank, passes) == (1, 5):
            os._exit(7)

    def run(rank: Rank) -> Any:
        kind, line, _ = step(rank, ParallelLayout(pp=2, dp=1), trouble)
        raise RuntimeError(f"{kind}: {line}")

    with pytest.raises(WorkerError) as failed:
        patient.run(run, ranks=2)
    summaries = {failure.rank: failure.summary for failure in failed.value.failures}
    assert summaries[1] == "exited with status 7"
    assert "PeerError: rank 1 (stage 1 of 2) did not " in summaries[0]


@pytest.mark.parametrize("victim", [0, 2])
def test_all_ranks_of_a_pipeline_name_the_one_that_left(
    worker_pool: WorkerPool, victim: int
) -> None:
    class Leaves(BaseException):
        """An error that is not reported: other ranks only see that the rank does not respond."""

    def trouble(rank: int, passes: int) -> None:
        if (rank, passes) == (victim, 5):
            raise Leaves

    def run(rank: Rank) -> Any:
        return step(rank, ParallelLayout(pp=4, dp=1), trouble)

    answers = worker_pool.run(run, ranks=4)
    for rank, (kind, line, _) in enumerate(answers):
        if rank == victim:
            assert kind == "Leaves"
        else:
            assert kind == "PeerError"
            assert f"rank {victim} (stage {victim} of 4) did not " in line, answers
            assert "on axis 'pp'" in line and "\n" not in line


V2 = ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v")
FAMILIES = [
    ("looped-bfs", ParallelLayout(pp=2, vpp=2, dp=1)),
    ("combined-1f1b", ParallelLayout(pp=2, dp=1)),
    ("zero-bubble", ParallelLayout(pp=2, dp=1)),
    ("zb-v", V2),
    ("dualpipe-v", V2),
]


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        # Each waits for its time-out; the others are whole where a rank dies.
        pytest.param(*family, id=family[0], marks=() if "zb-v" in family else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_a_frozen_rank_is_named_in_every_family_of_schedules(
    worker_pool: WorkerPool, schedule: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    given = Answers(tmp_path)

    def trouble(rank: int, passes: int) -> None:
        if (rank, passes) == (1, 3):
            given.wait_for([0])

    def run(rank: Rank) -> Any:
        answer = step(rank, layout, trouble, schedule=schedule)
        given.give(rank.rank)
        return answer

    (kind, line, seconds), (other_kind, other, _) = worker_pool.run(run, ranks=2, timeout=HANG)
    assert kind == other_kind == "PeerError"
    assert line.startswith("rank 1 (stage ") and f" of {2 * layout.vpp}) did not " in line
    assert "on axis 'pp'" in line and "micro-batch" in line and "\n" not in line
    assert seconds > SECONDS - 1
    assert "\n" not in other


@pytest.mark.parametrize(("schedule", "layout"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_a_rank_that_dies_is_named_in_every_family_of_schedules(
    patient: WorkerPool, schedule: str, layout: ParallelLayout
) -> None:
    def trouble(rank: int, passes: int) -> None:
        if (rank, passes) == (1, 5):
            os._exit(7)

    def run(rank: Rank) -> Any:
        kind, line, _ = step(rank, layout, trouble, schedule=schedule)
        raise RuntimeError(f"{kind}: {line}")

    with pytest.raises(WorkerError) as failed:
        patient.run(run, ranks=2)
    summaries = {failure.rank: failure.summary for failure in failed.value.failures}
    assert summaries[1] == "exited with status 7"
    assert "PeerError: rank 1 (stage " in summaries[0]


def test_stages_of_a_v_that_disagree_on_shapes_are_named(worker_pool: WorkerPool) -> None:
    def disagree(rank: Rank) -> Any:
        return step(rank, V2, schedule="zb-v", sizes=[2, 2] if rank.rank == 0 else [3, 3])

    for kind, line, _ in worker_pool.run(disagree, ranks=2):
        assert kind == LayoutError.__name__
        assert "ranks disagree on what stage " in line
        assert "rank 0: [2, 4] float32; rank 1: [3, 4] float32" in line


def _ends_with_its_error(rank: Rank, run: Callable[[Rank], tuple[str, str, float]]) -> None:
    kind, line, _ = run(rank)
    if kind:
        raise RuntimeError(f"{kind}: {line}")
