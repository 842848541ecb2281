"""Extensions that a run selects: their settings, checks and mistakes."""

import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

import pytest
import yaml
from megatron_parallel.extensions import Section
from megatron_train import TaskKind, TrainError
from megatron_train.cli import main
from megatron_train.config.extensions import SelectedExtensions, kinds_for, tasks_for
from megatron_train.config.run_sections import run_options, sections

RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 9
    --micro-batch-size 2 --train-iters 1 --mock-data --tokenizer-type NullTokenizer"""


def installed(monkeypatch, *entries):
    """Replaces the installed tasks by these entry points."""
    points = [EntryPoint(name, value, "megatron.tasks") for name, value in entries]
    monkeypatch.setattr(
        "megatron_parallel.extensions.entry_points",
        lambda group: points if group == "megatron.tasks" else entry_points(group=group),
    )


@dataclass(frozen=True)
class Colours:
    """Settings of a task."""

    red: float = field(default=0.5, metadata={"flag": "--red-share", "help": "share of red"})
    blue: int = field(default=1, metadata={"help": "steps of blue"})


def check_red(run):
    if run.section(Colours).red > run.training.micro_batch_size:
        raise TrainError("--red-share exceeds --micro-batch-size; lower it")


@pytest.fixture
def painting(monkeypatch):
    """Adds to gpt a task of another distribution for gpt models, and one for other models."""
    theirs = ModuleType("theirs")
    brings = {"sections": (Section("paint", Colours, "colours"),), "checks": (check_red,)}
    theirs.PAINT = TaskKind("paint", "for this test", "t:a", "t:b", **brings)
    theirs.OTHER = TaskKind("other", "for others", "t:a", "t:b", model_kinds=("t5",))
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    ours = ("gpt", "megatron_train.tasks.gpt_kind:TASK")
    installed(monkeypatch, ours, ("paint", "theirs:PAINT"), ("other", "theirs:OTHER"))
    sections.cache_clear(), run_options.cache_clear()
    yield theirs
    sections.cache_clear(), run_options.cache_clear()


def shown(words, capsys):
    """Returns the configuration that a command line prints."""
    assert main(["pretrain", "gpt", *RUN.split(), *words, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def refused(words, capsys, status=1):
    """Returns the error line of a refused command line."""
    assert main(["pretrain", "gpt", *RUN.split(), *words, "--print-config"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("megatron-train: error: ")


@pytest.mark.usefixtures("painting")
def test_settings_of_a_task_are_flags_keys_and_part_of_the_run(capsys, tmp_path):
    config = shown(["--task", "paint", "--red-share", "0.25"], capsys)
    assert config["training"]["task"] == "paint"
    assert config["paint"] == {"red": 0.25, "blue": 1} and "fim" not in config
    (tmp_path / "run.yaml").write_text("training: {task: paint}\npaint: {blue: 4}\n")
    again = shown(["--config", str(tmp_path / "run.yaml"), "--red-share", "1"], capsys)
    assert again["paint"] == {"red": 1.0, "blue": 4}
    (tmp_path / "run.yaml").write_text("paint: {bleu: 4}\n")
    assert "unknown key paint.bleu; did you mean paint.blue?" in refused(
        ["--config", str(tmp_path / "run.yaml")], capsys
    )
    with pytest.raises(SystemExit):
        main(["pretrain", "gpt", "--help-all"])
    assert "colours:\n  --red-share X" in capsys.readouterr().out


@pytest.mark.usefixtures("painting")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--task paint --red-share 3", "--red-share exceeds --micro-batch-size; lower it"),
        ("--task paint --red-share much", "--red-share needs a number, got 'much'"),
        (
            "--blue 2",
            "--blue is a setting of the task paint, but the run uses gpt; give --task paint or "
            "leave the setting out",
        ),
        (
            "--task paint --fim-rate 1",
            "--fim-rate is a setting of the task gpt, but the run uses paint; give --task gpt or "
            "leave the setting out",
        ),
        (
            "--task other",
            "--task other trains models of kind t5, not gpt; give one of gpt, paint",
        ),
        (
            "--task pait",
            "--task pait: no kind of task 'pait'; did you mean 'paint'?; installed are gpt, other, "
            "paint; install the distribution that provides it",
        ),
    ],
)
def test_settings_that_a_task_does_not_support_are_refused_in_one_line(words, line, capsys):
    assert refused(words.split(), capsys, 2 if "much" in words else 1) == line


def test_settings_of_two_distributions_with_one_name_are_refused(painting, monkeypatch, capsys):
    @dataclass(frozen=True)
    class Lengths:
        seq_length: int = 4

    section = Section("paint", Lengths, "lengths")
    painting.TWIN = TaskKind("twin", "for this test", "t:a", "t:b", sections=(section,))
    installed(monkeypatch, ("paint", "theirs:PAINT"), ("twin", "theirs:TWIN"))
    with pytest.raises(TrainError, match="two extensions add a section 'paint': "):
        run_options("gpt")
    with pytest.raises(
        TrainError, match=r"data\.seq_length and paint\.seq_length have the same flag"
    ):
        run_options("gpt", SelectedExtensions("twin"))


@pytest.mark.usefixtures("painting")
def test_tasks_are_listed_with_the_models_they_train(capsys):
    assert main(["tasks", "list"]) == 0
    listed = capsys.readouterr().out
    assert "gpt: predict each next token (megatron_train)\n  models: gpt, hybrid, mamba\n" in listed
    assert "other: for others (theirs)\n  models: t5\n" in listed
    assert "  settings: paint (colours)\n" in listed


@pytest.mark.usefixtures("painting")
def test_a_task_trains_the_kinds_that_it_names_or_is_the_default_of():
    assert tasks_for("gpt") == ["gpt", "paint"] and tasks_for("t5") == ["other", "paint"]
    assert kinds_for("other") == ["t5"] and {"gpt", "bert", "t5"} <= set(kinds_for("paint"))
    assert "gpt" in kinds_for("gpt") and "bert" not in kinds_for("gpt")


def test_a_section_of_an_extension_has_a_name_of_its_own(painting, monkeypatch):
    section = Section("data", Colours, "colours")
    painting.TWIN = TaskKind("twin", "for this test", "t:a", "t:b", sections=(section,))
    installed(monkeypatch, ("twin", "theirs:TWIN"))
    with pytest.raises(TrainError, match=r"the section 'data' of .* has the name of a sect"):
        sections("gpt", SelectedExtensions("twin"))


def test_a_section_may_be_shared_by_extensions(painting, monkeypatch):
    section = painting.PAINT.sections[0]
    painting.TWIN = TaskKind("twin", "for this test", "t:a", "t:b", sections=(section,))
    installed(monkeypatch, ("paint", "theirs:PAINT"), ("twin", "theirs:TWIN"))
    assert sections("gpt")["paint"] == ("colours", Colours)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--lora-rank 2",
            "--lora-rank is a setting of the product lora, but the run uses plain; give "
            "--linear-product lora or leave the setting out",
        ),
        (
            "--optimizer sgd --lion-beta1 0.5",
            "--lion-beta1 is a setting of the update rule lion, but the run uses sgd; give "
            "--optimizer lion or leave the setting out",
        ),
        (
            "--linear-product lroa",
            "--linear-product lroa: no product of linear layers 'lroa'; did you mean 'lora'?; ",
        ),
    ],
)
def test_settings_of_a_rule_or_product_that_is_not_selected_are_refused(words, line, capsys):
    assert refused(words.split(), capsys).startswith(line)


def test_a_setting_that_the_task_does_not_read_is_refused(capsys):
    words = RUN.replace("--tokenizer-type NullTokenizer", "--tokenizer-model t --data-path d")
    words = words.replace("--mock-data", "--eod-mask-loss")
    assert main(["pretrain", "bert", *words.split(), "--print-config"]) == 1
    assert (
        "--eod-mask-loss has no effect: the task bert does not read it; leave it out"
        in capsys.readouterr().err
    )
