"""The communication of a training step equals the formulas in every call and byte."""

from pathlib import Path
from unittest import mock

import pytest
from layouts.output import marks
from layouts.traffic.count import count
from layouts.traffic.formulas import added, formula
from layouts.traffic.jobs import JOBS, STEPS, Job
from layouts.traffic.table import differences, table
from megatron_models import parameter_count
from megatron_parallel import all_reduce
from megatron_parallel.tensor_parallel import RowParallelLinear

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
BY_TITLE = {job.title: job for job in JOBS}
SAMPLE = {
    *("tp2-tied", "tp2·sp-tied", "pp2-tied", "dp2-tied", "cp2-tied"),
    *("dp2·ep2-moe", "dp2·ep2·a2a-moe", "dp2·sharded-tied", "dp2·fsdp-tied"),
}


def test_every_kind_of_parallelism_is_counted():
    assert {job.name for job in JOBS} >= {
        *("tp2", "tp4", "tp2·sp", "tp4·sp", "pp2", "pp4", "dp2", "dp4", "tp2·sp·pp2·dp2"),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=job.title, marks=() if job.title in SAMPLE else pytest.mark.slow)
        for job in JOBS
    ],
)
def test_the_communication_of_every_rank_equals_the_formulas(worker_pool, job: Job):
    ranks = worker_pool.run_mesh(job.layout, count, job)
    assert len(ranks) == job.layout.world_size
    found = {rank: differences(job, rank, counted) for rank, counted in enumerate(ranks)}
    assert not any(found.values()), found


def count_with_a_superfluous_sum(mesh, job: Job):
    """Adds a maximum over ranks with equal values, which does not change the training."""
    true = RowParallelLinear.forward

    def wasteful(self, x, **options):
        y = true(self, x, **options)
        all_reduce(y.detach(), self.axis, "max")
        return y

    with mock.patch.object(RowParallelLinear, "forward", wasteful):
        return count(mesh, job)


def test_one_superfluous_collective_is_detected(worker_pool):
    job = BY_TITLE["tp2-tied"]
    counted = worker_pool.run_mesh(job.layout, count_with_a_superfluous_sum, job)[0]
    (line,) = differences(job, 0, counted)
    calls, nbytes = added(formula(job, 0), STEPS)["tp", "all_reduce"]
    more, extra = counted["tp", "all_reduce"]
    assert line.startswith("all_reduce on axis 'tp'")
    assert (
        (more - calls) * nbytes == calls * (extra - nbytes) > 0
    )  # each call has the same number of bytes


def test_other_and_missing_messages_are_detected():
    job = BY_TITLE["dp2-tied"]
    counted = added(formula(job, 0), STEPS)
    assert differences(job, 0, counted) == []
    counted["dp", "broadcast"] = (1, 8)
    del counted["world", "all_reduce of requests to stop"]
    assert len(differences(job, 0, counted)) == 2


def test_data_parallel_sums_every_parameter_once():
    job = BY_TITLE["dp4-tied"]
    calls, nbytes = added(formula(job, 0))["dp", "all_reduce of gradients"]
    assert nbytes == 4 * parameter_count(job.config, padded=True)
    assert calls == 2  # buckets of at most 16 MiB


def test_the_page_shows_the_current_formulas():
    exact = {
        job: [added(formula(job, rank), STEPS) for rank in range(job.layout.world_size)]
        for job in JOBS
    }
    text, failed = table(exact)
    assert not failed
    begin, end = marks("traffic")
    assert PAGE.read_text().split(begin)[1].split(end)[0] == f"\n{text}"
