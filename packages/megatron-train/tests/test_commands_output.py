"""What commands print, and how exceptions become messages and statuses."""

import errno
import re
import sys
from pathlib import Path

import pytest
import torch
from megatron_models import ConfigError
from megatron_train._command import CommandError
from megatron_train.cli import main
from megatron_train.cli.failure import failure_report
from megatron_train.cli.pretrain import ranks_to_start
from megatron_train.config.recipes import recipe_names, recipe_text
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import (
    SettingsError,
    TrainError,
    UsageError,
    collect_errors,
    raise_collected,
)
from megatron_train.launch.outcome import LaunchOutcome
from megatron_train.run_description import describe_layout, describe_run
from megatron_train.saved_values import describe_differences, read_value, short_repr

from .test_configuration import MINIMAL, parse


def printed(words, capsys):
    assert main(words.split()) == 0
    return capsys.readouterr().out


def cells(text):
    """Returns the cells of each line, which two spaces or more separate."""
    return [re.split("  +", line) for line in text.splitlines()]


# -- recipes and settings --------------------------------------------------------------------------


def test_every_recipe_is_listed_with_an_indented_description(capsys):
    lines = printed("recipes list", capsys).splitlines()
    assert [line for line in lines if not line.startswith("  ")] == recipe_names()
    assert max(map(len, lines)) <= 94 and all(line.strip() for line in lines)
    for name in recipe_names():
        assert printed(f"recipes show {name}", capsys) == recipe_text(name)


def test_settings_of_two_files_that_differ_are_in_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("training: {seed: 1, bf16: true}\ndata: {data_path: [x, y]}\n")
    (tmp_path / "second.yml").write_text("training: {seed: 1}\ncheckpoint: {save: s}\n")
    text = printed("recipes diff a.yaml second.yml", capsys)
    assert sorted(cells(text)) == sorted(
        [
            ["", "a.yaml", "second.yml"],
            ["data.data_path", "x y", "-"],
            ["training.bf16", "True", "False"],
            ["checkpoint.save", "-", "s"],
        ]
    )
    starts = {line.rindex("  ") for line in text.splitlines()}
    assert len(starts) == 1
    assert printed("recipes diff a.yaml a.yaml", capsys) == "  a.yaml  a.yaml\n"


def test_kinds_and_tasks_are_listed_with_their_package(capsys):
    models, tasks = printed("models list", capsys), printed("tasks list", capsys)
    assert re.search(r"^gpt: .* \(megatron_models\)\n  components: \w", models, re.MULTILINE)
    assert re.search(
        r"^  family llama: (.*, )?LlamaForCausalLM(, .*)? \(megatron_models\)$",
        models,
        re.MULTILINE,
    )
    assert re.search(
        r"^classification: .* \(megatron_train\)\n  models: .*bert.*\n  settings: \w+ \(",
        tasks,
        re.MULTILINE,
    )


def test_a_report_is_in_the_folder_of_its_run_unless_its_file_is_given(monkeypatch, capsys):
    written = []
    monkeypatch.setattr(
        "megatron_train.report.page.write_report", lambda *each: written.append(each)
    )
    for words, output in (("", "run/report.html"), (" --output page.html", "page.html")):
        assert printed(f"report run{words}", capsys) == f"{output}\n"
        assert written.pop() == (Path("run"), Path(output)) and not written


# -- layouts and schedules -------------------------------------------------------------------------


def test_a_schedule_has_defaults_of_micro_batches_stages_and_times(capsys):
    plain = printed("schedule --stages 2", capsys)
    assert plain == printed("schedule --stages 2 --micro-batches 4", capsys)
    times = "--forward-time 1 --backward-time 2 --send-time 0 --pipeline-schedule 1f1b"
    assert plain == printed(f"schedule --stages 2 {times}", capsys)
    one = "--num-virtual-stages-per-pipeline-rank 1"
    assert plain == printed(f"schedule --stages 2 {one}", capsys)
    chunks = "schedule --stages 2 --pipeline-schedule interleaved-1f1b"
    two = "--num-virtual-stages-per-pipeline-rank 2"
    assert printed(chunks, capsys) == printed(f"{chunks} {two}", capsys) != plain
    for changed in ("--forward-time 2", "--backward-time 3", "--send-time 1", "--micro-batches 5"):
        assert printed(f"schedule --stages 2 {changed}", capsys) != plain
    halves = "schedule --stages 2 --pipeline-schedule zero-bubble"
    assert printed(halves, capsys) == printed(f"{halves} --weight-time 1", capsys)
    assert printed(halves, capsys) != printed(f"{halves} --weight-time 0.5", capsys)


@pytest.mark.parametrize("number", ["0", "-1"])
def test_layers_of_a_layout_are_positive(number, capsys):
    words = "layout --world-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers"
    assert main([*words.split(), number]) == 2
    assert f"--num-layers must be positive, got {number}" in capsys.readouterr().err
    assert main([*words.split(), "1"]) == 0


def test_a_layout_may_have_a_single_rank(capsys):
    assert "rank" in printed("layout --world-size 1", capsys)


def test_the_order_of_axes_is_that_of_the_ranks(capsys):
    words = "layout --world-size 4 --tensor-model-parallel-size 2"
    assert printed(f"{words} --order tp-cp-ep-dp-pp", capsys) == printed(words, capsys)
    assert printed(f"{words} --order dp-cp-ep-tp-pp", capsys) != printed(words, capsys)


# -- scripts of Megatron-LM ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc_per_node 4 -m x", 4),
        ("torchrun --nproc-per-node=2", 2),
        ("torchrun --nproc_per_node=99999", 99999),
        ("torchrun --nproc_per_node 100000", 1),
        ("torchrun --nproc_per_node gpu", 1),
        ("torchrun --nproc_per_node 1", 1),
        ("python", 1),
        ("torchrun --nproc_per_node", 1),
    ],
)
def test_a_converted_script_is_started_with_its_ranks(launcher, ranks, tmp_path, capsys):
    script, output = tmp_path / "train.sh", tmp_path / "run.yaml"
    script.write_text(f"{launcher} pretrain_gpt.py --num-layers $N --lr 1 $M --manual-gc\n")
    text = printed(f"config from-megatron {script} --set N=2 --output {output}", capsys)
    lines = text.splitlines()
    assert lines[:7] == [
        "train.sh: 3 flags of pretrain_gpt.py, line 1",
        "  accepted      2",
        "  no effect     1",
        "  dropped       0",
        "  planned       0",
        "  refused       0",
        "  unknown       0",
    ]
    assert lines[-2] == (
        "note: unset variables, taken as empty: $M (line 1); give arguments of the script or --set"
    )
    start = f" --nproc-per-node {ranks}" if ranks > 1 else ""
    assert lines[-1] == f"wrote {output}: megatron-train pretrain gpt --config {output}{start}"
    text = output.read_text()
    assert text.startswith("about: from train.sh\nmodel:\n") and "  num_layers: 2\n" in text


@pytest.mark.parametrize(
    ("text", "accepted"),
    [("A=b", True), ("A=", True), ("_1=x=y", True), ("A", False), ("=b", False), ("1A=b", False)],
)
def test_a_variable_of_a_script_is_given_as_name_and_value(text, accepted, tmp_path, capsys):
    script = tmp_path / "train.sh"
    script.write_text("python pretrain_gpt.py --num-layers 2 --save a$A$_1\n")
    words = ["config", "from-megatron", str(script), "--set", text]
    assert main(words) == (0 if accepted else 2)
    shown = capsys.readouterr()
    if accepted:
        assert f"save: a{text.partition('=')[2]}\n" in shown.out
    else:
        assert f"--set needs NAME=VALUE, got {text!r}" in shown.err


# -- errors ----------------------------------------------------------------------------------------


def test_the_first_three_of_several_errors_are_in_the_message():
    assert str(SettingsError(["a", "b", "c"])) == "a; b; c"
    assert str(SettingsError(["a", "b", "c", "d"])) == "a; b; c; and 1 more"
    assert SettingsError(["a", "b", "c", "d", "e"]).lines == ["a", "b", "c", "d", "e"]


def test_errors_are_collected_once_each_and_raised_together():
    lines = []
    for error in (TrainError("a"), SettingsError(["b", "a"]), TrainError("c")):
        with collect_errors(lines):
            raise error
    assert lines == ["a", "b", "a", "c"]
    with pytest.raises(SettingsError) as several:
        raise_collected(lines)
    assert several.value.lines == ["a", "b", "c"]
    with pytest.raises(TrainError, match=r"^a$") as one:
        raise_collected(["a", "a"])
    assert not isinstance(one.value, SettingsError)
    raise_collected([])
    with pytest.raises(KeyError), collect_errors(lines):
        raise KeyError


@pytest.mark.parametrize(
    ("error", "kind", "status", "message"),
    [
        (SettingsError(["a\n b", "c"]), "own", 1, "a b\nc\n2 settings cannot be used"),
        (CommandError("a", "b  c"), "own", 2, "a\nb c"),
        (UsageError("a"), "own", 2, "a"),
        (TrainError("a\nb"), "own", 1, "a b"),
        (ConfigError("a {x}", {"x": 1}), "own", 1, "a x 1"),
        (KeyboardInterrupt(), "interrupted", 130, "interrupted"),
        (OSError(errno.ENOENT, "No such file", "f"), "own", 1, "f: No such file"),
        (OSError("full"), "own", 1, "full"),
        (MemoryError(), "own", 1, "out of memory: lower --micro-batch-size"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"),
            "own",
            1,
            "out of memory when allocating 2.00 GiB: lower --micro-batch-size",
        ),
        (
            RuntimeError("[../third_party/gloo/x.cc:81] Connection closed by peer\nmore"),
            "peer",
            1,
            "communication failed: Connection closed by peer",
        ),
        (RuntimeError("a\nb"), "bug", 1, "RuntimeError: a b"),
        (RuntimeError("in gloo/x.cc:8] closed"), "bug", 1, "RuntimeError: in gloo"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else None,
)
def test_exceptions_become_messages_and_statuses(error, kind, status, message):
    report = failure_report(error)
    assert (report.kind, report.status) == (kind, status)
    start_up = "start-up of axis 'world' at None:None: " if kind == "peer" else ""
    assert report.message.startswith(start_up + message)
    assert report.message == message or message.endswith(("size", "gloo")) or start_up
    assert ("Traceback" in report.traceback or "RuntimeError" in report.traceback) == (
        kind == "bug"
    )


def test_a_port_that_is_in_use_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "7")
    error = torch.distributed.DistNetworkError("failed to bind: EADDRINUSE")
    report = failure_report(error)
    assert report.kind == "port"
    assert report.message == "host:7 (MASTER_ADDR:MASTER_PORT) is in use; choose another port"


@pytest.mark.parametrize(
    ("text", "ranks"), [(None, 1), ("1", 1), ("12", 12), ("0", None), ("-1", None), ("1.5", None)]
)
def test_ranks_to_start_are_a_positive_number(text, ranks, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is None:
        with pytest.raises(UsageError, match="--nproc-per-node needs a positive integer"):
            ranks_to_start(text)
        return
    assert ranks_to_start(text) == ranks
    monkeypatch.setenv("WORLD_SIZE", "2")
    if text is not None:
        with pytest.raises(UsageError, match="this process is already one of 2 ranks"):
            ranks_to_start(text)


@pytest.mark.parametrize(
    ("outcome", "printed"),
    [
        (LaunchOutcome(0), ""),
        (
            LaunchOutcome(1, "rank 1: bad", "last lines\n"),
            "last lines\nmegatron-train: error: rank 1: bad\n",
        ),
        (LaunchOutcome(130, interrupted=True), "megatron-train: interrupted\n"),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_ranks_get_the_words_of_the_command_and_their_outcome_is_printed(
    outcome, printed, terminal, monkeypatch, capsys
):
    asked = []

    def launch(*arguments, **options):
        asked.append((arguments, options))
        return outcome

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("megatron_train.launch.launch.launch", launch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    flags = "--tensor-model-parallel-size 2 --nproc-per-node 2 --distributed-timeout-minutes 3"
    words = f"pretrain gpt {MINIMAL} {flags}".split()
    assert main(words) == outcome.status
    program = [sys.executable, "-P", "-m", "megatron_train.cli.rank"]
    (((started, given, ranks), options),) = asked
    assert (started, given, ranks, options["timeout"]) == (program, words, 2, 180)
    assert options["defaults"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    erased = "\r\033[K" if terminal else ""  # the rest of a progress bar
    assert capsys.readouterr().err == erased + printed


# -- values and descriptions -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_a_saved_counter_is_an_integer_of_64_bits(value):
    assert read_value({"n": value}, "n", int) == value


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", None])
def test_another_value_of_a_saved_counter_is_refused(value):
    with pytest.raises(TrainError) as caught:
        read_value({"n": value}, "n", int)
    assert str(caught.value) == f"the saved state is damaged: 'n' is {value!r}"
    with pytest.raises(TrainError, match="it has no 'm'"):
        read_value({"n": value}, "m", int)
    with pytest.raises(TrainError, match=r"is damaged: \[\] holds no 'm'"):
        read_value([], "m", int)
    assert read_value({"n": "a"}, "n", str) == "a"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 78, repr("x" * 78)),
        ("x" * 79, f"'{'x' * 37}...{'x' * 38}'"),
        (10**39, str(10**39)),
        (10**40, f"{'1' + '0' * 17}...{'0' * 19}"),
        ([1, 2, 3], "[1, 2, 3]"),
        ([1, 2, 3, 4], "[1, 2, 3, ...]"),
        ([[[[1]]]], "[[[[...]]]]"),
        ({"a": 1, "b": 2, "c": 3}, "{'a': 1, 'b': 2, 'c': 3}"),
        (10**5000, "an integer of thousands of digits"),
    ],
    ids=range(9),
)
def test_long_values_are_shown_in_short(value, shown):
    assert short_repr(value) == shown


def test_differences_have_both_values():
    assert describe_differences({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert describe_differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == (
        "a 1 in the checkpoint and None in this run, b 2 in the checkpoint and 3 in this run, "
        "c None in the checkpoint and 4 in this run"
    )


@pytest.mark.parametrize(
    ("flags", "ranks", "batch"),
    [
        ("", 1, "2 samples a step in 1 micro-batch of 2"),
        ("--global-batch-size 6", 1, "6 samples a step in 3 micro-batches of 2"),
        ("", 2, "4 samples a step in 1 micro-batch of 2 on each of 2 data parallel ranks"),
        (
            "--step-batch-size-schedule 0:2 160:8",
            1,
            "2 to 8 samples a step in 1 to 4 micro-batches of 2",
        ),
    ],
)
def test_a_run_is_described_with_its_batches(flags, ranks, batch):
    config = parse(f"{MINIMAL} {flags}", ranks=ranks)
    values = Values(
        {
            "training.seed": GivenValue(7, "--seed"),
            "data.data_path": GivenValue(("a", "b"), "run.yaml: data.data_path"),
        }
    )
    facts = {"torch": "2", "python": "3"}
    lines = [*describe_run(config, values, facts, torch.bfloat16)]
    assert lines[:2] == [
        "environment: torch 2, python 3",
        "configuration (settings that are not listed have their defaults):",
    ]
    assert sorted(lines[2:4]) == [
        "  data.data_path: a b  [run.yaml: data.data_path]",
        "  training.seed: 7  [--seed]",
    ]
    # 2 layers of 12 h^2 + 13 h, 100 tokens, 16 positions and the last norm, h = 8
    count = 2 * (12 * 64 + 13 * 8) + 116 * 8 + 16
    model = f"model: {count:,} parameters (without vocabulary padding) in bfloat16; {batch}"
    several = [f"layout: 2 ranks, {config.layout}"] if ranks > 1 else []
    assert lines[4:] == [*several, model]
    assert [*describe_run(config, None, facts, torch.float32)][1:2] == (
        several or [model.replace("bfloat16", "float32")]
    )


def test_documents_of_a_pool_of_ranks_are_described_by_their_tokens():
    flags = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8 --reset-attention-mask"
    config = parse(f"{MINIMAL} {flags} --tokenizer-model bytes --micro-batch-size 1", ranks=2)
    assert [*describe_run(config, None, {}, torch.float32)][-1].endswith(
        " samples a step in rows of at most 8 tokens a rank, in a pool of 2"
    )


def test_a_layout_is_described_with_sequence_parallelism():
    assert describe_layout(parse(MINIMAL)) == "1 rank"
    cut = parse(f"{MINIMAL} --tensor-model-parallel-size 2 --sequence-parallel", ranks=2)
    assert describe_layout(cut) == f"2 ranks, {cut.layout}, sequence parallel"
