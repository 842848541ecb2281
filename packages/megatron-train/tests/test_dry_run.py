"""Dry runs: which micro-batches are run, what follows from them, and the report."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from megatron_train.cli.main import build_parser, main
from megatron_train.config.described_run import resolve_run
from megatron_train.dry_run import dry_run as dry_run_module
from megatron_train.dry_run import rank as rank_module
from megatron_train.dry_run.dry_run import dry_run
from megatron_train.dry_run.repetition import Repetition, find_repetition

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 127 --micro-batch-size 1 --lr 1e-3 "
    # The hash of dropout has most operations of an eager step, each of which is imagined.
    "--attention-dropout 0 --hidden-dropout 0"
)


def resolved(flags):
    return resolve_run(build_parser().parse_args(["prove", "gpt", *SMALL.split(), *flags.split()]))


@pytest.mark.parametrize(
    ("flags", "pipeline_rank", "expected"),
    [
        ("--global-batch-size 9", 0, Repetition(9, 2, 1, 1)),
        ("--global-batch-size 1", 0, Repetition(1, 1, 1, 1)),
        # 1F1B: pp - r micro-batches in flight (Narayanan et al. 2021, section 2.2), and one more
        ("--pipeline-model-parallel-size 4 --global-batch-size 50", 0, Repetition(50, 5, 1, 1)),
        ("--pipeline-model-parallel-size 4 --global-batch-size 50", 1, Repetition(50, 4, 1, 1)),
        ("--pipeline-model-parallel-size 4 --global-batch-size 50", 3, Repetition(50, 2, 1, 1)),
        ("--pipeline-model-parallel-size 4 --global-batch-size 2", 0, Repetition(2, 2, 1, 1)),
        # GPipe: all of them
        (
            "--pipeline-model-parallel-size 2 --global-batch-size 20 --pipeline-schedule gpipe",
            0,
            Repetition(20, 20, 1, 1),
        ),
        # interleaved: rounds of pp micro-batches
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--global-batch-size 20",
            0,
            Repetition(20, 6, 2, 2),
        ),
        # 4 micro-batches in a row: 2 + 4 + 1 of 8 passes of 4 micro-batches are in flight
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--global-batch-size 20 --microbatch-group-size-per-virtual-pipeline-stage 4",
            0,
            Repetition(20, 8, 4, 4),
        ),
    ],
)
def test_the_schedule_repeats_after(flags, pipeline_rank, expected):
    assert find_repetition(resolved(flags), pipeline_rank) == expected


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_multiplied_counts_equal_those_of_the_whole_step(flags, monkeypatch):
    run = resolved(f"{flags} --global-batch-size 6")
    shorter = dry_run(run, "cpu", [0])
    whole = Repetition(6, 6, 6, 1)
    monkeypatch.setattr(rank_module, "find_repetition", lambda *_: whole)
    for ours, theirs in zip(shorter, dry_run(run, "cpu", [0]), strict=True):
        for name in ("waits", "kernels", "bytes_moved", "messages", "message_bytes", "flops"):
            expected = getattr(theirs.counts, name)
            found = getattr(ours.counts, name)
            assert (+found if isinstance(found, Counter) else found) == expected, name
        assert ours.peak == pytest.approx(theirs.peak, rel=0.005)


def test_memory_of_the_parts_by_hand():
    """12 h^2 + 13 h weights of each layer, fp32 AdamW: twice their size of state."""
    (use,) = dry_run(resolved("--global-batch-size 2"), "cpu", [0])
    weights = 4 * (12 * 64**2 + 13 * 64) + 128 * 64 + 32 * 64 + 2 * 64
    assert use.memory["parameters"] == 4 * weights
    assert 8 * weights <= use.memory["optimizer state"] < 8.1 * weights
    assert use.peak >= 16 * weights and use.layers == 4
    assert 0.0 < use.seconds < 600.0


def check_ranks_at_once():
    """Compares ranks that run at once, several or one, with the same ones in this process."""
    run, done = resolved("--pipeline-model-parallel-size 2 --global-batch-size 2"), []
    options = {"progress": lambda *count: done.append(count), "memory_only": True}
    (first,) = dry_run(run, "cpu", [0], **options, processes=2)
    both = dry_run(run, "cpu", [0, 1], **options, processes=2)
    one = dry_run(run, "cpu", [0, 1], **options)
    for ours, theirs in zip([first, *both], [one[0], *one], strict=True):
        assert (ours.rank, ours.counts) == (theirs.rank, theirs.counts)
        assert ours.peak == pytest.approx(theirs.peak, rel=1e-4)  # a first import has a tensor
    assert done == [(1, 1), (1, 2), (2, 2), (1, 2), (2, 2)]


def test_ranks_that_run_at_once_have_the_same_results():
    """In a process without a backward pass before; forked ones leave it so, also a single one."""
    program = "import test_dry_run; test_dry_run.check_ranks_at_once()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def broken(*_, **__):
    raise RuntimeError("another reason")


def one_waits(run, rank, *_, **__):
    """Fails on the first rank, while another one works."""
    if rank:
        time.sleep(600)
    run.layout.coordinates(64)


def refused_by_autograd(*_, **__):
    raise RuntimeError(
        "Unable to handle autograd's threading in combination with fork-based multiprocessing."
    )


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (lambda *_, **__: os._exit(3), r"rank [01] ended without a result \(exit code 3\)"),
        (lambda run, rank, *_, **__: run.layout.coordinates(64), "rank 64"),
        (refused_by_autograd, r"has run a backward pass .* pass processes=1"),
        (broken, r"rank [01] ended without a result \(exit code 1\)"),
        (one_waits, "rank 64"),
    ],
)
def test_a_rank_that_fails_ends_the_dry_run(ends, message, monkeypatch):
    monkeypatch.setattr(dry_run_module, "imagine_rank", ends)
    run = resolved("--pipeline-model-parallel-size 2")
    with pytest.raises(ValueError, match=message):
        dry_run(run, "cpu", [0, 1], processes=2)
    assert multiprocessing.active_children() == []


def test_no_more_ranks_run_at_once_than_processes(monkeypatch, tmp_path):
    def count(run, rank, *_, **__):
        (tmp_path / str(rank)).touch()
        time.sleep(0.1)  # for the others to start
        found = len([*tmp_path.iterdir()])
        (tmp_path / str(rank)).unlink()
        return found

    monkeypatch.setattr(dry_run_module, "imagine_rank", count)
    run = resolved("--pipeline-model-parallel-size 4 --world-size 8")
    found = dry_run(run, "cpu", [0, 1, 2, 3], processes=2)
    assert len(found) == 4 and max(found) <= 2


def test_the_memory_alone_is_that_of_the_whole_run():
    run = resolved("--pipeline-model-parallel-size 2 --global-batch-size 6")
    (whole,), (memory,) = (dry_run(run, "cpu", [0], memory_only=each) for each in (False, True))
    assert memory.peak == pytest.approx(whole.peak, rel=1e-4)  # a first import has a tensor
    assert memory.counts.flops < whole.counts.flops


def test_the_report_and_the_picture(tmp_path, capsys, monkeypatch):
    # This process has run a backward pass, after which forks of it may run none.
    monkeypatch.setattr("megatron_train.cli.dry_run._processes", lambda: 1)
    line = f"dry-run gpt {SMALL} --pipeline-model-parallel-size 2 --world-size 64 --on cpu"
    picture = tmp_path / "memory.png"
    assert main([*line.split(), "--output", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("64 ranks: tp 1 x cp 1 x dp 32 x pp 2")
    assert "counted as on a CPU" in printed
    assert "send of activations" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, last = found["of_ranks"]
    assert (first["rank"], last["rank"]) == (0, 32)
    assert sum(entry["bytes"] for entry in first["at_peak"]) == first["peak"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-ranks 1", "--pipeline-ranks needs numbers from 0 to 0, got '1'"),
        (
            "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16 --reset-attention-mask "
            "--world-size 2",
            "--hybrid-context-parallel: ranks share the documents of a step by their lengths",
        ),
        ("--output memory.txt", "--output memory.txt: the file name must end in .svg or .png"),
    ],
)
def test_refusals(flags, message, capsys):
    assert main([*f"dry-run gpt {SMALL} --on cpu {flags}".split()]) != 0
    assert message in capsys.readouterr().err
