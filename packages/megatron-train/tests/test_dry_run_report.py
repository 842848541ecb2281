"""The report of a dry run: every number of ranks whose memory and work are known."""

import json
import os
from collections import Counter
from dataclasses import replace

import pytest
from megatron_parallel.imagined import guard
from megatron_parallel.imagined.storages import OTHER
from megatron_train.cli import dry_run as command
from megatron_train.cli.main import build_parser, main
from megatron_train.config.described_run import resolve_run
from megatron_train.dry_run import dry_run as dry_run_module
from megatron_train.dry_run.counts import Counts, RankUse
from megatron_train.dry_run.repetition import Repetition, find_repetition
from megatron_train.dry_run.report import format_report, to_dict

GIB = 2**30
WORDS = (
    "dry-run gpt --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 127 --micro-batch-size 2 --lr 1e-3 "
    "--pipeline-model-parallel-size 2 --world-size 4096 --global-batch-size 12288 --on cpu"
)
COUNTS = Counts(
    waits=Counter({"loop.py:7": 2, "loop.py:9": 0}),
    blocking_copies=Counter({"data.py:1": 1000, "data.py:2": 234}),
    copies=Counter({"data.py:3": 5}),
    kernels=Counter({"mm": 1200, "add": 34}),
    bytes_moved=Counter({"add": GIB, "mul": GIB // 2}),
    flops=1_234_560_000_000_000,
    messages=Counter({("tp", "all-reduce"): 1500, ("pp", "send"): 3}),
    message_bytes=Counter({("tp", "all-reduce"): 3 * GIB, ("pp", "send"): GIB // 4}),
)
FIRST = RankUse(
    rank=0,
    pipeline_rank=0,
    stages=(0,),
    layers=2,
    micro_batches=3,
    run_micro_batches=2,
    memory={"parameters": GIB, "optimizer state": 2 * GIB, "gradients and buffers": 0},
    peak=5 * GIB,
    at_peak={
        ("parameters", "model.py:1"): GIB // 2,
        ("parameters", "model.py:2"): GIB // 2,
        ("optimizer state", "adam.py:3"): 2 * GIB,
        ("gradients and buffers", "bucket.py:4"): GIB // 4,
        (OTHER, "norm.py:5"): GIB // 2,
        (OTHER, "mlp.py:6"): 5 * GIB // 4,
    },
    counts=COUNTS,
    seconds=1.0,
)
LAST = replace(
    FIRST,
    rank=2048,
    pipeline_rank=1,
    layers=1,
    peak=4 * GIB,
    counts=replace(
        COUNTS,
        waits=Counter({"loop.py:7": 1100, "optim.py:2": 1}),
        messages=Counter({("pp", "send"): 2, ("dp", "all-reduce"): 1}),
        message_bytes=Counter({("pp", "send"): GIB // 8, ("dp", "all-reduce"): GIB}),
        flops=0,
    ),
)


@pytest.fixture(scope="module")
def run():
    return resolve_run(build_parser().parse_args(WORDS.split()))


def table(lines):
    """Returns the cells of each line, which two spaces or more separate."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_every_number_is_in_its_row_with_its_unit(run):
    lines = [*format_report(run, [FIRST, LAST], "cpu", "")]
    assert lines[:4] == [
        "4,096 ranks: tp 1 x cp 1 x dp 2048 x pp 2, order tp-cp-ep-dp-pp",
        "a step of 12,288 samples: 3 micro-batches of 2 x 1,024 tokens on each rank",
        "counted as on a CPU",
        "",
    ]
    assert table(lines[4:18]) == [
        ["rank", "0", "2,048"],
        ["pipeline rank", "0", "1"],
        ["layers", "2", "1"],
        ["memory at the peak", "5.00 GiB", "4.00 GiB"],
        ["parameters", "1.00 GiB", "1.00 GiB"],
        ["gradients and buffers", "0.25 GiB", "0.25 GiB"],
        ["optimizer state", "2.00 GiB", "2.00 GiB"],
        [OTHER, "1.75 GiB", "1.75 GiB"],
        ["memory between steps", "3.00 GiB", "3.00 GiB"],
        ["kernels of a step", "1,234", "1,234"],
        ["products and attention", "1,234.6 TFLOP", "0.0 TFLOP"],
        ["moved by other kernels", "1.50 GiB", "1.50 GiB"],
        ["waits for the device", "2", "1,101"],
        ["blocking copies", "1,234", "1,234"],
    ]
    assert table(lines[18:24]) == [
        ["micro-batches run", "2 of 3", "2 of 3"],
        [],
        ["axis", "message", "rank 0: calls, GiB", "rank 2048: calls, GiB"],
        ["tp", "all-reduce", "1,500", "3.000", "0", "0.000"],
        ["pp", "send", "3", "0.250", "2", "0.125"],
        ["dp", "all-reduce", "0", "0.000", "1", "1.000"],
    ]
    assert lines[24:] == [
        "",
        f"peak of rank 0, {OTHER} by line",
        "  1.25 GiB  mlp.py:6",
        "  0.50 GiB  norm.py:5",
        "",
        "waits for the device in a step, by line",
        "   1,100  loop.py:7",
        "       1  optim.py:2",
    ]


def test_columns_are_aligned(run):
    lines = [*format_report(run, [FIRST, LAST], "cpu", "")]
    assert len({len(line) for line in lines[4:19]}) == 1
    assert len({len(line) for line in lines[20:24]}) == 1
    assert lines[4].startswith("rank  ") and lines[4].endswith("  2,048")
    assert lines[20].startswith("axis  message     ")


def test_a_rank_without_waits_or_messages_and_with_one_micro_batch(run):
    idle = replace(
        COUNTS, waits=Counter({"loop.py:9": 0}), messages=Counter(), message_bytes=Counter()
    )
    many = {(OTHER, f"file.py:{n}"): n * GIB for n in range(1, 11)}
    one = replace(FIRST, micro_batches=1, counts=idle, at_peak=many)
    text = "\n".join(format_report(run, [one], "cuda", ""))
    assert ": 1 micro-batch of 2 x 1,024 tokens" in text
    assert "counted as" not in text and "in a step, by line" not in text
    assert "axis  message  rank 0: calls, GiB\n" in text
    shown = [line for line in text.splitlines() if "file.py" in line]
    assert shown == [f"  {n}.00 GiB  file.py:{n}" for n in range(10, 2, -1)]


def test_a_device_that_cannot_be_imagined_is_named(run):
    lines = [*format_report(run, [FIRST], "cpu", "no guard")]
    assert lines[2] == "counted as on a CPU, since no CUDA device could be imagined: no guard"


def test_plain_values_are_those_of_the_ranks(run):
    found = json.loads(json.dumps(to_dict(run, [FIRST, LAST], "cuda")))
    assert (found["ranks"], found["device"]) == (4096, "cuda")
    assert found["layout"] == str(run.layout)
    first, last = found["of_ranks"]
    assert (first["rank"], first["layers"], first["stages"]) == (0, 2, [0])
    assert (first["peak"], last["peak"], first["memory"]["parameters"]) == (5 * GIB, 4 * GIB, GIB)
    assert [entry["bytes"] for entry in first["at_peak"]] == [
        *(2 * GIB, 5 * GIB // 4, GIB // 2, GIB // 2, GIB // 2, GIB // 4)
    ]
    assert first["at_peak"][1] == {"part": OTHER, "line": "mlp.py:6", "bytes": 5 * GIB // 4}
    assert last["messages"] == [
        {"axis": "pp", "operation": "send", "calls": 2, "bytes": GIB // 8},
        {"axis": "dp", "operation": "all-reduce", "calls": 1, "bytes": GIB},
    ]
    assert first["kernels"] == {"mm": 1200, "add": 34} and first["flops"] == COUNTS.flops
    assert first["blocking_copies"] == {"data.py:1": 1000, "data.py:2": 234}
    assert first["copies"] == {"data.py:3": 5} and first["bytes_moved"]["mul"] == GIB // 2
    assert first["waits"]["loop.py:7"] == 2
    assert "counts" not in first


def test_counts_of_more_periods_add_their_difference():
    longer = replace(
        COUNTS,
        waits=Counter({"loop.py:7": 5, "new.py:1": 1}),
        kernels=Counter({"mm": 1200, "add": 36}),
        flops=COUNTS.flops + 10,
        copies=Counter(),
        blocking_copies=COUNTS.blocking_copies + Counter({"data.py:1": 1}),
        bytes_moved=COUNTS.bytes_moved + Counter({"mul": 7}),
        messages=COUNTS.messages + Counter({("pp", "send"): 2}),
        message_bytes=COUNTS.message_bytes + Counter({("pp", "send"): 64}),
    )
    found = COUNTS.extrapolated(longer, 3)
    assert found.waits == Counter({"loop.py:7": 2 + 3 * 3, "new.py:1": 3})
    assert found.kernels == Counter({"mm": 1200, "add": 34 + 3 * 2})
    assert found.flops == COUNTS.flops + 30
    assert found.copies["data.py:3"] == 5 - 3 * 5
    assert found.blocking_copies["data.py:1"] == 1003
    assert found.bytes_moved["mul"] == GIB // 2 + 21
    assert found.messages["pp", "send"] == 9
    assert found.message_bytes["pp", "send"] == GIB // 4 + 192
    assert COUNTS.extrapolated(longer, 0) == replace(COUNTS)
    assert COUNTS.extrapolated(longer, 1).flops == longer.flops


@pytest.mark.parametrize(
    ("found", "times", "sizes"),
    [
        (Repetition(20, 6, 2, 2), 9, (6, 2, 2, 4, 4)),
        (Repetition(9, 2, 1, 1), 8, (2, 1, 1, 2, 2)),
        (Repetition(1, 1, 1, 1), 0, (1, 1, 1)),
        (Repetition(2, 2, 2, 2), 0, (2, 2, 2)),
        (Repetition(10, 8, 6, 4), 1, (8, 6, 6, 10, 10)),
    ],
)
def test_a_whole_step_is_a_short_one_and_periods(found, times, sizes):
    assert (found.times, found.sizes) == (times, sizes)
    assert found.short + found.times * found.period == found.whole


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # 1F1B of 2 stages has 2 micro-batches in flight on the first, and one more is run
        ("--global-batch-size 4096", Repetition(1, 1, 1, 1)),
        ("--global-batch-size 8192", Repetition(2, 2, 1, 1)),
        ("--global-batch-size 16384", Repetition(4, 3, 1, 1)),
    ],
)
def test_no_more_micro_batches_are_run_than_the_step_has(flags, expected):
    planned = resolve_run(build_parser().parse_args([*WORDS.split(), *flags.split()]))
    assert find_repetition(planned, 0) == expected


@pytest.fixture
def requests(monkeypatch):
    """Replaces the dry run by one without work, and returns the devices and ranks asked for."""
    asked = []

    def dry_run(planned, device, pipeline_ranks, progress, *, processes):
        asked.append((device, tuple(pipeline_ranks)))
        assert processes == command._processes()
        progress(len(pipeline_ranks), len(pipeline_ranks))
        return [FIRST, LAST]

    monkeypatch.setattr(dry_run_module, "dry_run", dry_run)
    return asked


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", (0, 1)),
        ("--num-layers 8 --pipeline-model-parallel-size 8", (0, 4, 7)),
        ("--num-layers 3 --pipeline-model-parallel-size 3 --world-size 3", (0, 1, 2)),
        ("--pipeline-model-parallel-size 1", (0,)),
        ("--pipeline-ranks 1", (1,)),
        ("--pipeline-ranks 1 0", (1, 0)),
    ],
)
def test_the_first_a_middle_and_the_last_pipeline_rank_run(flags, ranks, requests, capsys):
    flags += " --global-batch-size 24576" if "--world-size" not in flags else ""
    flags += " --global-batch-size 2" if "--world-size 3" in flags else ""
    assert main([*WORDS.split(), *flags.split(), "--json"]) == 0
    assert requests == [("cpu", ranks)]
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"


@pytest.mark.parametrize("wrong", ["2", "-1", "1.0", "x", "0 2"])
def test_a_pipeline_rank_that_the_layout_lacks_is_refused(wrong, requests, capsys):
    assert main([*WORDS.split(), "--pipeline-ranks", *wrong.split()]) == 2
    if wrong != "-1":  # which the parser takes for a flag
        last = wrong.split()[-1]
        message = f"--pipeline-ranks needs numbers from 0 to 1, got {last!r}"
        assert message in capsys.readouterr().err
    assert not requests


@pytest.mark.parametrize(
    ("on", "guard_loads", "has_cuda", "device", "status"),
    [
        ("auto", True, False, "cuda", 0),
        ("auto", False, False, "cpu", 0),
        ("auto", False, True, "cuda", 0),
        ("cuda", True, False, "cuda", 0),
        ("cuda", False, True, "cuda", 0),
        ("cuda", False, False, None, 1),
        ("cpu", True, True, "cpu", 0),
    ],
)
def test_the_device_is_cuda_where_it_can_be_imagined(
    on, guard_loads, has_cuda, device, status, requests, monkeypatch, capsys
):
    def load():
        if not guard_loads:
            raise guard.NoGuardError("no compiler here")

    monkeypatch.setattr(command, "load_guard", load)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    assert main([*WORDS.split(), "--on", on]) == status
    assert [asked for asked, _ in requests] == ([] if device is None else [device])
    shown = capsys.readouterr()
    reason = "since no CUDA device could be imagined: no compiler here"
    assert (reason in shown.out) == (on == "auto" and device == "cpu")
    error = "megatron-train: error: --on cuda: no compiler here; give --on cpu\n"
    assert shown.err == (error if device is None else "")


def test_a_rank_runs_on_each_core_where_processes_can_be_forked(monkeypatch):
    for cores, processes in ((5, 5), (1, 1), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert command._processes() == processes
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.delattr(os, "fork")
    assert command._processes() == 1


def test_a_bar_counts_the_ranks(requests, bars):
    assert main([*WORDS.split(), "--json"]) == 0
    assert [(bar.unit, bar.n, bar.total) for bar in bars] == [("rank", 2, 2)]
