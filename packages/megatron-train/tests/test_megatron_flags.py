"""The table of Megatron-LM's flags against what `pretrain gpt` accepts, and its answers."""

from pathlib import Path

import pytest
from megatron_train.cli import main
from megatron_train.cli.main import build_parser
from megatron_train.config.flags import ALIASES, LAYERS_PER_VIRTUAL_STAGE
from megatron_train.config.megatron_flags import megatron_flags, render_flags
from megatron_train.config.run import run_options

ROOT = Path(__file__).parents[3]
PRETRAIN = "megatron-train pretrain gpt"
FLAGS = megatron_flags()
OTHERS = [flag for flag in FLAGS if flag.kind in ("planned", "refused")]
ACCEPTED = {option.flag for option in run_options()} | set(ALIASES) | {LAYERS_PER_VIRTUAL_STAGE}


def spelling(flag):
    return flag.flag


def test_the_table_says_of_each_flag_one_thing():
    names = [flag.flag for flag in FLAGS]
    assert len(names) == len(set(names)) and sum(flag.in_readme for flag in FLAGS) == 81
    for flag in FLAGS:
        assert bool(flag.text) != bool(flag.commands), flag
        assert flag.issue is None or flag.kind == "planned"


@pytest.mark.parametrize("flag", FLAGS, ids=spelling)
def test_what_the_table_says_is_what_the_parser_does(flag):
    takes = PRETRAIN in flag.commands or flag.kind == "alias"
    assert (flag.flag in ACCEPTED) == takes


def test_the_parser_accepts_what_the_options_say_and_no_more():
    parser = build_parser()
    for word in PRETRAIN.split()[1:]:
        (commands,) = (action for action in parser._actions if action.metavar and action.choices)
        parser = commands.choices[word]
    opposites = {option.opposite for option in run_options()} - {None}
    own = {"-h", "--help", "--config", "--recipe", "--print-config", "--nproc-per-node"}
    assert set(parser._option_string_actions) == ACCEPTED | opposites | own


@pytest.mark.parametrize("flag", OTHERS, ids=spelling)
@pytest.mark.parametrize("form", ["{} 3", "{}", "{}=3"])
def test_a_planned_or_refused_flag_is_answered_with_its_line(flag, form, capsys):
    words = ["pretrain", "gpt", "--num-layers", "2", *form.format(flag.flag).split(), "--seed", "1"]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed == f"megatron-train: error: {flag.answer()}\n"
    assert flag.text in printed and "unknown" not in printed


def test_a_flag_of_another_command_is_sent_there(capsys):
    assert main(["pretrain", "gpt", "--append-eod"]) == 2
    assert "--append-eod is a flag of megatron-data preprocess" in capsys.readouterr().err
    assert main(["layout", "--world-size", "2", "--hidden-size", "3"]) == 2
    assert "--hidden-size is a flag of megatron-train pretrain gpt" in capsys.readouterr().err


def layout(words, capsys):
    command = f"pretrain gpt --recipe gpt2-124m --vocab-size 9 --data-path d {words}"
    status = main([*command.split(), "--print-config"])
    printed = capsys.readouterr()
    found = [line for line in printed.out.splitlines() if line.startswith("  vpp:")]
    return found[0].split() if status == 0 else printed.err


def test_layers_of_a_virtual_stage_say_how_many_there_are(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    assert layout(f"{words} 2", capsys)[1:] == ["3", "#", LAYERS_PER_VIRTUAL_STAGE]
    monkeypatch.delenv("WORLD_SIZE")
    both = f"{words} 2 --num-virtual-stages-per-pipeline-rank 3"
    for wrong, message in {
        f"{words} 4": "does not divide 12 layers on 2 pipeline stages",
        f"{words} two": "needs a positive number, got 'two'",
        both: "exclude each other",
    }.items():
        printed = layout(wrong, capsys)
        assert message in printed and printed.count("\n") == 1


def test_the_page_is_up_to_date():
    page = ROOT / "docs" / "megatron-flags.md"
    if not page.parent.exists():
        pytest.skip("the documentation is not beside the package")
    assert page.read_text() == render_flags(), "run python tooling/generated_docs.py"
