"""The table of Megatron-LM's flags matches lists of flags and the commands' parsers."""

import re
from pathlib import Path

import pytest
from megatron_train.cli import main
from megatron_train.cli.main import build_parser
from megatron_train.config.aliases import ALIASES
from megatron_train.config.flags import (
    LAYERS_PER_VIRTUAL_STAGE,
    Parser,
    add_options,
    given_flags,
    implied_flags,
)
from megatron_train.config.run_sections import run_options, sections
from megatron_train.errors import TrainError
from megatron_train.megatron_lm.page import render_flags
from megatron_train.megatron_lm.table import STATUSES, megatron_flags

ROOT = Path(__file__).parents[3]
LISTS = Path(__file__).parent / "megatron_flags"
PRETRAIN = "megatron-train pretrain gpt"
FINETUNE = "megatron-train finetune classification"
FLAGS = megatron_flags()
KEYS = {option.key for option in run_options()}
TITLES = {name: title for name, (title, _) in sections().items()}
GPT_ALIASES = {flag for flag, alias in ALIASES.items() if alias.sets[-1][0] in KEYS}
"""Aliases of flags that are for models of kind GPT, too."""
UNCONVERTED = {flag for flag in GPT_ALIASES if ALIASES[flag].convert is str}
ACCEPTED = {option.flag for option in run_options()} | GPT_ALIASES | {LAYERS_PER_VIRTUAL_STAGE}
OPPOSITES = {option.opposite for option in run_options()} - {None}
REQUIRED = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 9 --seq-length 8"
RUN = f"{REQUIRED} --micro-batch-size 1 --train-iters 1 --eval-iters 0 --train-data-path d"


def listed(name):
    lines = (LISTS / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("--")]


def values(flag):
    """Returns valid values of a flag of the table."""
    if flag.choices:
        return [flag.choices[0]]
    return ["3"] * (flag.arity if isinstance(flag.arity, int) else 2)


def printed(words, capsys, status):
    assert main(words) == status
    return capsys.readouterr()


def test_every_flag_of_the_parser_has_one_status():
    names = listed("parser")
    assert len(names) == len(set(names)) == 878
    assert {name for name, flag in FLAGS.items() if flag.in_parser} == set(names)
    for flag in FLAGS.values():
        assert flag.status in STATUSES and bool(flag.reason) != bool(flag.commands), flag
        assert "issue" not in flag.reason


@pytest.mark.parametrize(("name", "count"), [("readme", 81), ("bridge", 230)])
def test_flags_of_other_lists_are_in_the_table(name, count):
    names = listed(name)
    assert len(names) >= count and not set(names) - FLAGS.keys()


def test_the_table_and_the_parser_accept_the_same_flags():
    kinds = ("works", "alias")
    accepted = {name for name, flag in FLAGS.items() if flag.accepted and flag.status in kinds}
    assert accepted <= ACCEPTED | OPPOSITES
    of_other_tasks = {name for name, flag in FLAGS.items() if flag.commands == (FINETUNE,)}
    assert FLAGS.keys() & (ACCEPTED | OPPOSITES) == accepted | of_other_tasks
    assert {name for name in accepted if FLAGS[name].status == "alias"} == {
        *GPT_ALIASES,
        LAYERS_PER_VIRTUAL_STAGE,
    }


def test_the_parser_accepts_exactly_the_options():
    parser = build_parser()
    for word in PRETRAIN.split()[1:]:
        (commands,) = (action for action in parser._actions if action.metavar and action.choices)
        parser = commands.choices[word]
    assert set(parser._option_string_actions) == {"-h", "--help"}  # the others wait for its use
    parser.complete()
    own = {"-h", "--help", "--help-all", "--config", "--recipe", "--print-config"}
    own.add("--nproc-per-node")
    assert set(parser._option_string_actions) == ACCEPTED | OPPOSITES | own


@pytest.mark.parametrize("form", ["{} 3", "{}", "{}=3"])
def test_all_planned_or_refused_flags_are_reported_together(form, capsys):
    refused = [flag for flag in FLAGS.values() if flag.status in ("planned", "refused")]
    words = " ".join(form.format(flag.flag) for flag in refused).split()
    error = printed(["pretrain", "gpt", "--seed", "2", *words, "--lr", "1"], capsys, 2).err
    *lines, last = error.splitlines()
    assert lines == [f"megatron-train: error: {flag.message()}" for flag in refused]
    assert last == (
        f"megatron-train: error: {len(refused)} arguments cannot be used; see "
        "megatron-train pretrain gpt --help"
    )


def test_all_flags_without_effect_are_accepted_and_noted_once(capsys):
    harmless = [flag for flag in FLAGS.values() if flag.status == "no effect"]
    words = [word for flag in harmless for word in (flag.flag, *values(flag))]
    shown = printed(["pretrain", "gpt", *RUN.split(), *words, "--print-config"], capsys, 0)
    lines = shown.err.splitlines()
    assert all(line.startswith("megatron-train: note: ") for line in lines)
    assert len(lines) == len({flag.reason for flag in harmless}) < len(harmless) / 3
    named = [word.rstrip(",") for word in shown.err.split() if word.startswith("--")]
    assert all(named.count(flag.flag) >= 1 for flag in harmless)
    assert "seed: 1234" in shown.out


def test_unsupported_values_are_refused_beside_unknown_flags(capsys):
    words = "--dataloader-type=cyclic --manual-gcc --fp8-formt e4m3 --manual-gc"
    error = printed(["pretrain", "gpt", *words.split()], capsys, 2).err
    assert error.count("megatron-train: error: ") == 4 == error.count("\n")
    assert "--dataloader-type cyclic is not supported" in error and "give single" in error
    assert "unknown argument --manual-gcc; did you mean --manual-gc?" in error
    assert "unknown argument --fp8-formt; did you mean --fp8-format?" in error


def test_a_missing_update_rule_is_refused_with_the_installed_ones(capsys):
    error = printed(["pretrain", "gpt", *RUN.split(), "--optimizer", "soap"], capsys, 1).err
    assert error.startswith("megatron-train: error: --optimizer: no update rule 'soap'; installed")
    assert re.search(r"are adafactor, adam, .*sgd; install", error) and error.count("\n") == 1


@pytest.mark.parametrize("word", ["--manual-gc", "--fp4-format", "--fp8-param-gather"])
def test_a_flag_of_the_table_is_never_confused_with_another(word, capsys):
    words = ["layout", "--world-size", "2", word, "3"]
    error = printed(words, capsys, 2).err
    assert FLAGS[word].message() in error and "did you mean" not in error


@pytest.mark.parametrize("word", ["--min-lrs-of-all", "--xyz", "--compiler-cache-folder"])
def test_a_far_spelling_has_no_suggestion(word, capsys):
    error = printed(["pretrain", "gpt", word], capsys, 2).err
    assert f"unknown argument {word}; see megatron-train pretrain gpt --help" in error


def test_a_flag_of_another_command_names_that_command(capsys):
    assert main(["pretrain", "gpt", "--append-eod"]) == 2
    assert "--append-eod is a flag of megatron-data preprocess" in capsys.readouterr().err
    assert main(["layout", "--world-size", "2", "--hidden-size", "3"]) == 2
    assert "--hidden-size is a flag of megatron-train pretrain gpt" in capsys.readouterr().err


def settings(words, capsys):
    command = f"pretrain gpt --recipe gpt2-124m --vocab-size 9 --data-path d {words}"
    status = main([*command.split(), "--print-config"])
    shown = capsys.readouterr()
    if status:
        return shown.err
    lines = (line.split("#")[0].strip() for line in shown.out.splitlines())
    return dict(line.split(": ") for line in lines if ": " in line)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--group-query-attention", {"num_query_groups": "1"}),
        ("--group-query-attention --num-query-groups 4", {"num_query_groups": "4"}),
        ("--num-query-groups 6 --group-query-attention", {"num_query_groups": "6"}),
        ("--openai-gelu", {"activation": "gelu_tanh"}),
        ("--layernorm-epsilon 1e-3", {"norm_epsilon": "0.001"}),
        ("--save s --persistent-save-interval 7", {"save_interval": "7"}),
        ("--grad-reduce-in-fp32", {"accumulate_allreduce_grads_in_fp32": "true"}),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor 2",
            {"rope_scaling_type": "linear", "rope_scaling_factor": "2.0"},
        ),
        ("--position-embedding-type rope --use-rope-scaling", {"rope_scaling_type": "llama3"}),
        ("--window-size 127,0", {"sliding_window": "128"}),
        ("--window-size (3,0)", {"sliding_window": "4"}),
        ("--window-size=-1,-1", {"sliding_window": "0"}),
        ("--window-size=-1,0", {"sliding_window": "0"}),
        ("--window-size 0,0", {"sliding_window": "1"}),
        ("--mup-output-mult 4", {"logits_scaling": "0.25"}),
        ("--bf16 --main-grads-dtype bf16", {"accumulate_allreduce_grads_in_fp32": "false"}),
        ("--bf16 --main-grads-dtype fp32", {"accumulate_allreduce_grads_in_fp32": "true"}),
        ("--sequence-parallel", {"sequence_parallel": "false"}),
    ],
)
def test_aliases_set_their_settings(words, found, capsys):
    assert found.items() <= settings(words, capsys).items()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("5,2", "'5,2': causal attention has no tokens after its own; use 5,0"),
        ("5,-1", "'5,-1': causal attention has no tokens after its own; use 5,0"),
        ("5", "'5' is not two numbers of tokens L,R"),
        ("a,0", "'a,0' is not two numbers of tokens L,R"),
        ("-2,0", "'-2,0' is not two numbers of tokens L,R"),
    ],
)
def test_windows_of_megatron_reach_back_only(value, reason, capsys):
    found = settings(f"--window-size={value}", capsys)
    assert reason in found


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--mup-output-mult 0", "'0' is not a number other than 0"),
        ("--mup-output-mult x", "'x' is not a number other than 0"),
        ("--main-grads-dtype fp16", "'fp16' is not a format of gradients; use fp32 or bf16"),
    ],
)
def test_values_that_an_alias_cannot_convert_are_refused(words, reason, capsys):
    assert reason in settings(words, capsys)


@pytest.mark.parametrize(
    "flag", sorted(flag for flag in GPT_ALIASES if ALIASES[flag].convert is str)
)
def test_an_alias_is_the_same_as_the_flags_in_its_help(flag):
    alias = ALIASES[flag]
    assert alias.weak == ("unless" in alias.help)
    same = alias.help.removeprefix("the same as ").partition(",")[0].split()
    value = ["3"] if alias.takes_value else []
    words = [word.replace("X", "3") for word in same]
    words += [] if words[-1] == "3" else value
    parsed = []
    for line in ([flag, *value], words):
        parser = Parser()
        add_options(parser, run_options(), TITLES)
        namespace = parser.parse_args(line)
        read = implied_flags if alias.weak and line[0] == flag else given_flags
        given = read(namespace, run_options()).given
        parsed.append({key: each.value for key, each in given.items()})
    assert parsed[0] == parsed[1] and parsed[0]


def test_a_note_names_all_flags_without_effect_for_one_reason(capsys):
    by_reason = {}
    for flag in FLAGS.values():
        if flag.status == "no effect" and flag.arity == 0:
            by_reason.setdefault(flag.reason, []).append(flag.flag)
    reason, (one, other, *_) = next(item for item in by_reason.items() if len(item[1]) > 1)
    for words, named in (([one], f"{one} has"), ([one, other, one], f"{one}, {other} have")):
        shown = printed(["pretrain", "gpt", *RUN.split(), *words, "--print-config"], capsys, 0).err
        assert shown == f"megatron-train: note: {named} no effect here: {reason}\n"


def test_a_value_that_has_no_equal_is_refused_after_a_space_too(capsys):
    words = [*RUN.split(), "--dataloader-type", "cyclic", "--print-config"]
    error = printed(["pretrain", "gpt", *words], capsys, 2).err
    assert "--dataloader-type cyclic is not supported" in error
    words[-2] = "single"
    assert "--dataloader-type has no effect" in printed(["pretrain", "gpt", *words], capsys, 0).err


def test_flags_without_effect_in_a_run_are_noted(capsys):
    words = f"{RUN} --sequence-parallel --data-cache-path c --rotary-base 5 --print-config"
    lines = printed(["pretrain", "gpt", *words.split()], capsys, 0).err.splitlines()
    assert [line.split(" has no effect with ") for line in lines] == [
        [
            "megatron-train: note: --sequence-parallel",
            "--tensor-model-parallel-size 1: there are no activations to split",
        ],
        [
            "megatron-train: note: --data-cache-path",
            "--sample-order stateless, which has no index to cache",
        ],
        [
            "megatron-train: note: --rotary-base 5.0",
            "--position-embedding-type learned_absolute",
        ],
    ]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss", "--moe-seq-aux-loss-coeff"),
        ("--moe-aux-loss-coeff 0.1 0.2", "--moe-global-aux-loss-coeff"),
    ],
)
def test_lists_of_losses_are_refused_with_a_remedy(words, remedy, capsys):
    flag, _, values = words.partition(" ")
    error = printed(["pretrain", "gpt", *f"{RUN} {words} --seed 2".split()], capsys, 2).err
    assert f"{flag} takes one value, not {values}; give" in error and remedy in error
    assert error.count("\n") == 1


def test_all_unusable_settings_are_reported_together(capsys, tmp_path):
    words = f"{RUN} --lr fast --seed one --lr-decay-style cosin"
    error = printed(["pretrain", "gpt", *words.split()], capsys, 2).err
    assert error.count("\n") == 4 and "4 " not in error and "3 flags cannot be used" in error
    words = f"{RUN} --seq-length 16 --max-position-embeddings 8 --fim-rate 1 --global-batch-size 3"
    words += " --micro-batch-size 2 --lr-warmup-iters 9"
    error = printed(["pretrain", "gpt", *words.split()], capsys, 1).err
    assert error.count("\n") == 5 and "4 settings cannot be used" in error
    for part in ("--seq-length 16 exceeds", "--fim-rate needs", "--global-batch-size 3 is not"):
        assert part in error
    file = tmp_path / "run.yaml"
    file.write_text("training: {seed: one, sead: 1}\nmodle: {num_layers: 2}\n")
    error = printed(["config", "check", str(file)], capsys, 1).err
    assert error.count("\n") == 4 and "training.sead" in error and "'modle'" in error


def test_layers_per_virtual_stage_determine_the_number_of_stages(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    assert settings(f"{words} 2", capsys)["vpp"] == "3"
    assert settings(f"{words} 1", capsys)["vpp"] == "6"
    for text in ("0", "x"):
        monkeypatch.setenv("WORLD_SIZE", text)
        assert f"WORLD_SIZE={text} in the environment is not" in settings("", capsys)
    monkeypatch.delenv("WORLD_SIZE")
    alone = f"{words.rsplit(maxsplit=1)[-1]} 5"
    assert "5 does not divide 12 layers on 1 pipeline ranks" in settings(alone, capsys)
    both = f"{words} 2 --num-virtual-stages-per-pipeline-rank 3"
    for wrong, message in {
        f"{words} 4": "does not divide 12 layers on 2 pipeline ranks",
        f"{words} two": "needs a positive number, got 'two'",
        f"{words} 0": "needs a positive number, got '0'",
        both: "exclude each other",
    }.items():
        error = settings(wrong, capsys)
        assert message in error and error.count("\n") == 1


def read_table(folder, monkeypatch, **files):
    """Reads a table of flags from files of these names and contents."""
    (folder / "flags").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "flags" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr("megatron_train.megatron_lm.table.resources.files", lambda _: folder)
    return megatron_flags()


def test_a_table_has_the_flags_of_its_files_in_the_order_of_names(tmp_path, monkeypatch):
    found = read_table(
        tmp_path,
        monkeypatch,
        b="title: later\nparser: false\nno_effect: {it is done: [--d, --c N N]}\n",
        a="title: first\nworks: {'x y, z': ['--b {p,q}', '--a N...', '--e [N...]']}\n",
    )
    assert list(found) == ["--b", "--a", "--e", "--d", "--c"]
    choice, several, any_number, switch, pair = found.values()
    assert [flag.arity for flag in found.values()] == [1, "+", "*", 0, 2]
    assert (choice.status, choice.commands, choice.reason) == ("works", ("x y", "z"), "")
    assert choice.choices == ("p", "q") and several.choices == any_number.choices == ()
    assert (pair.status, pair.commands, pair.reason) == ("no effect", (), "it is done")
    assert (choice.subject, choice.in_parser) == ("first", True)
    assert (switch.subject, switch.in_parser, switch.metavar) == ("later", False, "")
    assert choice.message() == "--b is a flag of x y and z" and not choice.accepted
    assert switch.accepted and switch.message() == "--d has no effect here: it is done"
    assert choice.invalid_value_message(["p", "q"]) == several.invalid_value_message(["r"]) == ""
    assert choice.invalid_value_message(["p", "r"]) == (
        "--b r is not supported; give p or q, or leave it out"
    )


def test_a_table_with_an_unknown_status_or_a_flag_twice_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TrainError, match="table of flags, first: unknown status 'wroks'"):
        read_table(tmp_path, monkeypatch, a="title: first\nwroks: {x: [--a]}\n")
    twice = "title: second\nplanned: {x: [--a]}\n"
    with pytest.raises(TrainError, match="table of flags, second: --a is listed twice"):
        read_table(tmp_path, monkeypatch, a=twice, b=twice)


def test_the_page_is_up_to_date():
    page = ROOT / "docs" / "megatron-flags.md"
    if not page.parent.exists():
        pytest.skip("the documentation is not beside the package")
    assert page.read_text() == render_flags(), "run python tooling/generated_docs.py"
