"""The memory of a dry run equals what torch's profiler measures in a real run on CPUs.

Gloo copies the tensors of reduce-scatters and all-gathers, which NCCL does not. Layouts with such
collectives run on real tensors with one real rank, whose collectives give no values.
"""

import gc

import pytest
import torch
from megatron_parallel import Mesh
from megatron_parallel.testing import WorkerPool
from megatron_train.assembly import build_trainer, choose_dtype
from megatron_train.broadcast_batches import open_batches
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.config.run import RunConfig
from megatron_train.dry_run.rank import imagine_rank
from megatron_train.tasks.kinds import find_task_kind
from torch.profiler import ProfilerActivity, profile

SMALL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --lr 1e-3 "
    "--max-position-embeddings 256 --vocab-size 1000 --micro-batch-size 2 --global-batch-size 8 "
    "--no-check-for-nan-in-loss-and-grad"
)
SLOW = pytest.mark.slow
LAYOUTS = {
    "one rank": "",
    "tp2, sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "distributed optimizer": "--use-distributed-optimizer --world-size 2 --bf16",
    "cp2, full recompute": "--context-parallel-size 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
}


def resolved(flags: str) -> RunConfig:
    words = ["prove", "gpt", *SMALL.split(), *flags.split()]
    return resolve_run(build_parser().parse_args(words))


def measured_peak(mesh: Mesh, run: RunConfig) -> int:
    """Returns the largest number of bytes of tensors at once, from build to the second step."""
    task = find_task_kind(run.task)
    batches = open_batches(run, lambda: task.open_proof_data(run), mesh)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = build_trainer(run, task, batches, mesh, choose_dtype(run))
        steps = batches.training(0)
        for _ in range(2):
            trainer.step(steps)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(
        (e for e in events if e.name() == "[memory]"), key=lambda each: each.start_ns()
    ):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [name if name in ("one rank", "pp2") else pytest.param(name, marks=SLOW) for name in LAYOUTS],
)
def test_the_peak_equals_the_profilers(name: str, worker_pool: WorkerPool):
    run = resolved(LAYOUTS[name])
    if "tp2" in name:
        with Mesh.imagined(run.layout, 0) as mesh:
            real = measured_peak(mesh, run)
    else:
        real = worker_pool.run_mesh(run.layout, measured_peak, run)[0]
    imagined = imagine_rank(run, 0, torch.device("cpu")).peak
    assert imagined == pytest.approx(real, rel=0.03)
