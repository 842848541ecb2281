"""Every flag that one rank refuses changes what several ranks hold, read or send.

The comparison ignores losses, which depend on the layout by rounding, and copies of the
configuration.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from flags_on_ranks import BASE, ON_RANKS, UNEVEN, Words, command
from megatron_data import ByteTokenizer, IndexedDatasetBuilder
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from megatron_train import GPTTask, StepEngine, TrainError, pretrain
from megatron_train.cli import main
from megatron_train.cli.main import build_parser
from megatron_train.config.resolve import resolve
from megatron_train.metrics import peak

SAMPLE = {"layout.pp", "placement.cp_comm_type", "placement.sequence_parallel"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a corpus and a tokenizer."""
    place = tmp_path_factory.mktemp("flags")
    ByteTokenizer().save(place / "bytes")
    with IndexedDatasetBuilder(str(place / "text"), "uint16") as builder:
        for start in range(20):
            builder.add_item([*((start + i) % 250 for i in range(9)), 256])
            builder.end_document()
        builder.finalize()
    return place


@pytest.fixture(scope="module")
def observed() -> dict[str, Any]:
    """Returns a cache of the observations of runs."""
    return {}


def resolved(words: Words, ranks: int, folder: Path) -> ParallelLayout:
    """Returns the layout of a run, or raises its error."""
    with contextlib.chdir(folder):
        config, _ = resolve(build_parser().parse_args(command(words)), ranks)
    return config.layout


def observe(mesh: Mesh, words: Words, folder: Path) -> dict[str, Any]:
    """Runs the command as one rank and returns what it holds, reads, sends and prints."""
    result: dict[str, Any] = {"read": []}
    inputs, run = GPTTask.stage_inputs, StepEngine.run

    def recording_inputs(task: GPTTask, batch: Any, *rest: Any) -> Any:
        result["read"].append(batch.fields["tokens"].tolist())
        return inputs(task, batch, *rest)

    def recording_run(engine: StepEngine, *rest: Any) -> Any:
        sums = run(engine, *rest)
        result["held"] = {name: tuple(p.shape) for name, p in engine.stages.parameters.items()}
        result["order"] = [str(action) for action in engine._pipeline.trace]
        return sums

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.chdir(folder)
        patch.setenv("WORLD_SIZE", str(mesh.world_size))
        patch.delenv("RANK", raising=False)  # otherwise a rank that fails would end the worker
        patch.setattr(pretrain, "build_mesh", lambda config, device: mesh)
        patch.setattr(Mesh, "close", lambda mesh: None)  # the pool closes the mesh
        patch.setattr(peak, "measured_peak", lambda *_: None)
        patch.setattr(GPTTask, "stage_inputs", recording_inputs)
        patch.setattr(StepEngine, "run", recording_run)
        with mesh.counting() as traffic, contextlib.redirect_stdout(io.StringIO()):
            result["status"] = main(command(words))
    result["errors"] = printed.getvalue()
    result["sent"] = {(r.axis, r.operation): (r.calls, r.nbytes) for r in traffic.records}
    return result


def run_on_ranks(pool: WorkerPool, words: Words, ranks: int, folder: Path) -> list[dict[str, Any]]:
    return pool.run_mesh(resolved(words, ranks, folder), observe, words, folder)


@pytest.mark.parametrize("key", ON_RANKS)
def test_ranks_accept_the_flag_that_one_rank_refuses(key, folder):
    ranks, context, change = ON_RANKS[key]
    words = {**BASE, **context, **change}
    resolved(words, ranks, folder)
    with pytest.raises(TrainError):
        resolved(words, 1, folder)
    if context != UNEVEN:
        resolved({**BASE, **context}, ranks, folder)


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=() if key in SAMPLE else pytest.mark.slow) for key in ON_RANKS],
)
def test_a_flag_changes_the_run_of_several_ranks(key, worker_pool, folder, observed):
    ranks, context, change = ON_RANKS[key]
    after = run_on_ranks(worker_pool, {**BASE, **context, **change}, ranks, folder)
    assert [one["status"] for one in after] == [0] * ranks, after[0]["errors"]
    if context == UNEVEN:
        with pytest.raises(TrainError, match="3 layers"):
            resolved({**BASE, **context}, ranks, folder)
        return
    known = f"{ranks} {context}"
    if known not in observed:
        observed[known] = run_on_ranks(worker_pool, {**BASE, **context}, ranks, folder)
        assert [one["status"] for one in observed[known]] == [0] * ranks, observed[known][0][
            "errors"
        ]
    assert after != observed[known]


@pytest.mark.slow
def test_equal_runs_compare_equal(worker_pool, folder):
    first, second = (run_on_ranks(worker_pool, BASE, 2, folder) for _ in range(2))
    assert first == second
