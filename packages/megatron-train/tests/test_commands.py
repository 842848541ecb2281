"""The commands of megatron-train: help, output and errors."""

import re
import subprocess
import sys

import pytest
from megatron_train.cli import main
from megatron_train.config.run_sections import run_options, sections

COMMANDS = [
    [],
    ["pretrain"],
    ["pretrain", "gpt", "--help-all"],
    ["pretrain", "gpt"],
    ["layout"],
    ["schedule"],
    ["report"],
    ["recipes"],
    ["recipes", "diff"],
    ["config", "find"],
]


def test_help_of_all_commands_does_not_import_torch():
    script = (
        "import sys; from megatron_train.cli import main\n"
        f"for words in {COMMANDS!r}:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for part in ("--num-layers", "--lr-warmup-fraction", "default 969,30,1"):
        assert part in shown


def test_help_is_grouped_and_readable(capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "gpt", "--help-all"])
    text = capsys.readouterr().out
    offsets = [text.index(f"\n{title}:\n") for title, _ in sections().values()]
    assert offsets == sorted(offsets)
    shown = re.findall(r"^  (--[a-z][a-z0-9-]*)(?= |$)", text, re.MULTILINE)
    for option in run_options():
        assert shown.count(option.flag) == 1, option.flag
    assert max(map(len, text.splitlines())) <= 100
    assert not [line for line in text.splitlines() if line.endswith("-")]
    assert "turn off: biases in every linear layer" in text


def test_help_shows_the_groups_of_flags_in_a_page(capsys):
    with pytest.raises(SystemExit):
        main(["pretrain", "gpt", "--help"])
    text = capsys.readouterr().out
    rows = re.findall(r"^  (\w+) +(\d+) flags? +--", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(sections())
    words = re.findall(r"^  \w+ +(\d+) (flags?) ", text, re.MULTILINE)
    assert all((number == "1") == (word == "flag") for number, word in words)
    assert "2" in {number for number, _ in words}
    assert int(dict(rows)["lora"]) == 3 and "--lora-rank, --lora-alpha" in text
    for row in (line for line in text.splitlines() if re.match(r"^  \w+ +\d+ flags? +--", line)):
        _, count, _, *flags = row.split()
        whole = len(flags) == int(count) and not row.endswith(",")
        assert whole or flags[-1] == "...", row
    assert "--config FILE" in text and "example:" in text
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 100


def test_help_shows_all_flags_of_the_named_groups(capsys):
    with pytest.raises(SystemExit) as left:
        main(["pretrain", "gpt", "--help-all", "lora", "layout"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert text.index("--lora-rank N") < text.index("--tensor-model-parallel-size N")
    assert "--num-layers-per-virtual-pipeline-stage N" in text and "--hidden-size N" not in text
    assert main(["pretrain", "gpt", "--help-all", "modle"]) == 2
    assert "unknown group 'modle'; did you mean model? (known: model" in capsys.readouterr().err


def test_a_layout_is_drawn(capsys):
    words = "layout --world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    assert main(words.split()) == 0
    assert main([*words.split(), "--order", "tp-pp-dp"]) == 0
    drawn = capsys.readouterr().out
    assert "tp" in drawn and "pp" in drawn


def test_a_layout_takes_the_layers_of_a_virtual_stage(capsys):
    words = ["layout", "--world-size", "4", "--pipeline-model-parallel-size", "2"]
    each = ["--num-layers-per-virtual-pipeline-stage", "2"]
    assert main([*words, "--num-virtual-stages-per-pipeline-rank", "2"]) == 0
    expected = capsys.readouterr().out
    assert main([*words, *each, "--num-layers", "8"]) == 0
    assert capsys.readouterr().out == expected and "pp 1 (stages 1 3)" in expected
    assert main([*words, *each]) == 2
    assert "give both or leave them out" in capsys.readouterr().err
    assert main([*words, *each, "--num-layers", "6"]) == 2
    assert "2 does not divide 6 layers on 2 pipeline ranks" in capsys.readouterr().err


def test_a_schedule_is_drawn(capsys, tmp_path):
    words = ["schedule", "--pipeline-model-parallel-size", "2", "--micro-batches", "3"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 | F0 F1  .  . B0--- F2 B1---  . B2--- |",
        "rank 1 |  . F0 B0--- F1 B1--- F2 B2---  .  . |",
        "bubble 25.0%; in-flight micro-batches at most, by rank: 2, 1",
    ]
    for name, start in (("a.svg", b"<svg "), ("a.png", b"\x89PNG")):
        times = ["--pipeline-schedule", "zb-v", "--backward-time", "2.0001", "--send-time", "0.3"]
        assert main([*words, *times, "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
        assert capsys.readouterr().out.startswith("bubble 9.5%; ")  # too detailed for text
    assert {path.name for path in tmp_path.iterdir()} == {"a.svg", "a.png"}


def test_config_find_shows_settings_that_contain_a_word(capsys):
    assert main(["config", "find", "warmup", "fraction"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "--lr-warmup-fraction  (schedule.lr_warmup_fraction)\n    warm-up as a"
    )
    assert printed.count("\n") == 2
    assert main(["config", "find", "fp8", "factory"]) == 0
    assert capsys.readouterr().out.startswith(
        "--fp8-quantizer-factory is not supported yet; planned: "
    )
    assert main(["config", "find", "decay-style"]) == 0
    assert "{constant,linear,cosine,inverse-square-root,polynomial,WSD}" in capsys.readouterr().out


def test_config_find_replaces_a_misspelt_word_by_the_nearest(capsys):
    assert main(["config", "find", "learning", "end"]) == 0
    expected = capsys.readouterr().out
    assert main(["config", "find", "lerning", "End"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected and "--min-lr" in expected
    assert captured.err == (
        "megatron-train: note: no setting matches; showing 'learning' instead of 'lerning'\n"
    )


def test_stages_is_an_alias_of_pipeline_model_parallel_size(capsys):
    words = ["schedule", "--micro-batches", "3"]
    assert main([*words, "--pipeline-model-parallel-size", "2"]) == 0
    expected = capsys.readouterr().out
    assert main([*words, "--stages", "2"]) == 0
    assert capsys.readouterr().out == expected


def test_config_check_validates_files(tmp_path, capsys):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("training: {seed: 1}\noptimizer: {lr: 1e-4}\n")
    bad.write_text("training: {seed: one}\n")
    assert main(["config", "check", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: 2 settings, all valid\n"
    assert main(["config", "check", str(good), str(bad)]) == 1
    assert f"{bad}: training.seed needs an integer, got 'one'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("pretrian gpt", 2, "unknown command 'pretrian'; did you mean pretrain?"),
        ("--num-layers 2 pretrain gpt", 2, "give the command before --num-layers (one of pretrain"),
        (
            "pretrain --num-layers 12",
            2,
            "give the model before --num-layers (one of ",
        ),
        ("pretrain --num-layers=12 gpt", 2, "give the model before --num-layers (one of"),
        ("pretrain --halp gpt", 2, "unknown argument --halp; did you mean --help?"),
        ("pretrain gtp", 2, "unknown model 'gtp'; did you mean gpt?"),
        ("", 2, "the following arguments are required: COMMAND"),
        ("config find", 2, "the following arguments are required: WORD"),
        ("config find zzz", 1, "no setting contains 'zzz'"),
        ("layout", 2, "the following arguments are required: --world-size"),
        ("layout --world-size 0", 2, "--world-size must be positive, got 0"),
        ("layout --world-size 6 --tensor-model-parallel-size 4", 1, "6 is not a multiple of tp 4"),
        (
            "layout --world-size 2 --hidden-size 8",
            2,
            "--hidden-size is a flag of megatron-train pretrain gpt",
        ),
        ("layout --world-size 2 --tensor-modle-paralel-size 2", 2, "did you mean --tensor-model-"),
        ("schedule", 2, "the following arguments are required: --pipeline-model-parallel-size"),
        ("schedule --pipeline-model-parallel-size 0", 1, "0 pipeline ranks: use at least 1"),
        (
            "schedule --pipeline-model-parallel-size 2 --forward-time 0",
            1,
            "--forward-time 0.0: use a",
        ),
        (
            "schedule --pipeline-model-parallel-size 2 --weight-time 5",
            1,
            "--weight-time 5.0 is not between 0 and --backward-time 2.0",
        ),
        (
            "schedule --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            1,
            "does not support --num-virtual-stages-per-pipeline-rank 3: it needs 1 chunk per rank",
        ),
        (
            "schedule --pipeline-model-parallel-size 2 --pipeline-schedule interleaved-1f1b "
            "--microbatch-group-size-per-virtual-pipeline-stage 1",
            1,
            "--microbatch-group-size-per-virtual-pipeline-stage 1 is less than "
            "--pipeline-model-parallel-size 2, so",
        ),
        ("schedule --pipeline-model-parallel-size 2 --output a.pdf", 1, "must end in .svg or .png"),
        (
            "schedule --pipeline-model-parallel-size 4 --pipeline-schedule dualpipe-v "
            "--micro-batches 7",
            1,
            "cannot run 7 micro-batches: it needs at least one for each of its 2 x 4 = 8 stages",
        ),
        ("pretrain gpt --num-layer 2", 2, "did you mean --num-layers?"),
        ("pretrain gpt --config nowhere.yaml", 1, "nowhere.yaml: No such file or directory"),
    ],
)
def test_usage_errors_are_one_line(words, status, message, capsys):
    assert main(words.split()) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megatron-train: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_a_flag_of_megatron_without_effect_is_no_error(command, capsys):
    assert main(f"{command} gpt --dataloader-type single --hidden-sise 8".split()) == 2
    error = capsys.readouterr().err
    assert "unknown argument --hidden-sise" in error and "--dataloader-type" not in error


@pytest.mark.parametrize(
    ("words", "needed"),
    {
        "": "COMMAND",
        "merge": "--load, --save",
        "merge --load a": "--save",
        "upcycle": "--load, --save",
        "upcycle --load a": "--save",
        "layout": "--world-size",
        "schedule": "--pipeline-model-parallel-size/--stages",
        "report": "RUN",
        "recipes diff": "ONE, OTHER",
        "config from-megatron": "SCRIPT",
        **dict.fromkeys(("pretrain", "prove", "plan", "dry-run"), "MODEL"),
        **dict.fromkeys(("recipes", "models", "tasks", "config"), "ACTION"),
        "finetune": "TASK",
    }.items(),
)
def test_arguments_that_a_command_needs_are_named(words, needed, capsys):
    assert main(words.split()) == 2
    line = f"the following arguments are required: {needed}; see megatron-train"
    assert line in capsys.readouterr().err
