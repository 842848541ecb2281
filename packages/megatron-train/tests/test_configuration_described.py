"""Settings that a command, a checkpoint or the run itself adds to those that are given."""

import dataclasses

import pytest
import yaml
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer
from megatron_models import BertConfig, GPTConfig, record_of
from megatron_train.cli import main
from megatron_train.cli.main import build_parser
from megatron_train.config.aliases import ALIASES
from megatron_train.config.described_run import resolve_run
from megatron_train.config.finetune import finetune_options, finetune_titles
from megatron_train.config.plan import requested_ranks
from megatron_train.config.run_sections import run_options, sections
from megatron_train.config.sections import LoggingConfig
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, UsageError
from megatron_train.megatron_lm.table import megatron_flags
from megatron_train.saving import tokenizer_files

from .test_configuration import MINIMAL, parse

SIZES = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8"


def described(flags=""):
    return resolve_run(build_parser().parse_args(["prove", "gpt", *f"{SIZES} {flags}".split()]))


def test_a_described_run_needs_a_model_and_the_length_of_samples_only():
    run = described()
    assert run.data.data_path == ("synthetic",) and not run.data.mock_data
    assert run.data.tokenizer_type == "NullTokenizer"
    assert run.model.vocab_size == 32001  # with the end-of-document token
    training = run.training
    assert (training.micro_batch_size, training.train_iters, training.train_samples) == (
        1,
        100,
        None,
    )
    assert (run.evaluation.eval_iters, run.layout.dp) == (0, 1)


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        ("--vocab-size 99", "model", {"vocab_size": 100}),
        ("--tokenizer-type ByteTokenizer", "model", {"vocab_size": 257}),
        ("--mock-data", "data", {"data_path": None, "mock_data": True}),
        ("--train-data-path a", "data", {"data_path": None, "train_data_path": ("a",)}),
        ("--train-samples 7", "training", {"train_iters": None, "train_samples": 7}),
        ("--train-iters 7", "training", {"train_iters": 7, "train_samples": None}),
        ("--micro-batch-size 3", "training", {"micro_batch_size": 3}),
        ("--eval-iters 5", "evaluation", {"eval_iters": 5}),
        ("--world-size 3", "layout", {"dp": 3}),
        ("--tensor-model-parallel-size 2 --world-size 6", "layout", {"dp": 3, "tp": 2}),
        ("--tensor-model-parallel-size 2", "layout", {"dp": 1, "tp": 2}),
    ],
)
def test_a_described_run_has_the_settings_that_are_given(flags, section, expected):
    found = getattr(described(flags), section)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_number_of_ranks_is_a_positive_integer():
    namespace = build_parser().parse_args(["plan", "gpt"])
    assert requested_ranks(namespace) is None
    for name in ("world_size", "nproc_per_node"):
        for text in ("1", "12"):
            vars(namespace)[name] = text
            assert requested_ranks(namespace) == int(text)
        for text in ("0", "-1", "x"):
            vars(namespace)[name] = text
            flag = name.replace("_", "-")
            with pytest.raises(
                UsageError, match=f"--{flag} needs a positive integer, got '{text}'"
            ):
                requested_ranks(namespace)
        vars(namespace)[name] = None


@pytest.mark.parametrize(
    ("flags", "ranks", "note"),
    [
        ("--sequence-parallel", 1, "--sequence-parallel has no effect with --tensor-model-para"),
        ("--sequence-parallel --tensor-model-parallel-size 2", 2, ""),
        ("--data-cache-path c", 1, "--data-cache-path has no effect with --sample-order stateless"),
        ("--data-cache-path c --sample-order compat", 1, ""),
        ("--num-workers 1", 1, ""),
        (
            "--num-workers 1 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16 "
            "--tokenizer-type ByteTokenizer --reset-attention-mask --micro-batch-size 1",
            1,
            "--num-workers has no effect with --hybrid-context-parallel, whose ranks exchange",
        ),
        ("--no-rope-fusion", 1, "--no-rope-fusion has no effect: no layer of this model has such"),
        ("--no-rope-fusion --position-embedding-type rope", 1, ""),
    ],
)
def test_settings_without_effect_are_noted(flags, ranks, note, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    words = f"pretrain gpt {MINIMAL} {flags} --print-config"
    assert main(words.split()) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(note)
    assert all(line.startswith(f"megatron-train: note: {note}") for line in lines)


@pytest.mark.parametrize(
    ("name", "observes", "measures"),
    [
        ("log_layer_outputs", True, False),
        ("log_max_attention_logit", True, False),
        ("log_params_norm", False, True),
        ("log_layer_norms", False, True),
        ("log_num_zeros_in_grad", False, True),
        ("log_update_ratios", False, True),
        ("log_throughput", False, False),
    ],
)
def test_each_report_turns_on_what_it_needs(name, observes, measures):
    found = LoggingConfig(**{name: True})
    assert (found.observes, found.measures) == (observes, measures)


def test_a_run_has_sections_of_its_extensions_only():
    run = parse(MINIMAL)
    assert run.section_by_name("training") is run.training
    assert run.section_by_name("fim") is run.extension_settings["fim"]
    with pytest.raises(TrainError, match="gpt, update rule adam, product plain add no section"):
        run.section(LoggingConfig)
    with pytest.raises(TrainError, match="add no section lora, paint"):
        dataclasses.replace(run, extension_settings={"paint": 1, "lora": 2, "fim": 3})


def test_what_was_checked_cannot_be_changed():
    run = parse(f"{MINIMAL} --optimizer adam")
    selected = run.selected_extensions
    values = Values({"training.seed": GivenValue(1, "--seed")})
    parts = [run.section_by_name(name) for name in sections("gpt", selected)]
    parts += [run, selected, run.batch_sizes, values, values.given["training.seed"]]
    parts += [run_options()[0], ALIASES["--swiglu"], megatron_flags()["--swiglu"]]
    for part in parts:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)


def test_the_layers_of_a_stage_are_divided_once(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = MINIMAL.replace("--num-layers 2", "--hybrid-layer-pattern M-|M*")
    words = f"pretrain hybrid {words} --pipeline-model-parallel-size 2 --print-config"
    sizes = "--mamba-num-heads 4 --mamba-head-dim 4 --mamba-num-groups 2 --mamba-state-dim 4"
    assert main(f"{words} {sizes}".split()) == 0
    capsys.readouterr()
    assert main(f"{words} {sizes} --decoder-first-pipeline-num-layers 1".split()) == 1
    assert (
        "--decoder-first-pipeline-num-layers has no effect, since the model divides its layers "
        "over the 2 pipeline stages; leave it out"
    ) in capsys.readouterr().err


# -- settings of a checkpoint ---------------------------------------------------------------------

REST = "--seq-length 8 --micro-batch-size 1 --train-iters 1 --mock-data --print-config"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Saves models of width 8 and 16, one of BERT and a checkpoint without a model."""
    monkeypatch.chdir(tmp_path)
    sizes = {"num_layers": 2, "num_attention_heads": 2, "vocab_size": 257}
    sizes |= {"max_position_embeddings": 8}
    models = {
        "narrow": GPTConfig(**sizes, hidden_size=8),
        "wide": GPTConfig(**sizes, hidden_size=16),
    }
    models["bert"] = BertConfig(**sizes, hidden_size=8)
    files = tokenizer_files(ByteTokenizer())
    for name, config in models.items():
        own = files if name == "narrow" else {}
        CheckpointStore(name).save(
            1, {}, model=ModelRecord(family=None, **record_of(config)), files=own
        )
    CheckpointStore("nameless").save(1, {"trainer": {}})


def shown(words, capsys, status=0):
    """Returns the printed configuration, or the error of a refused command."""
    assert main(words.split()) == status
    captured = capsys.readouterr()
    if status:
        assert captured.err.count("\n") == 1
        return captured.err
    return yaml.safe_load(captured.out)


@pytest.mark.usefixtures("folders")
def test_a_model_comes_from_the_first_folder_that_has_one(capsys):
    words = f"pretrain gpt {REST} --tokenizer-type ByteTokenizer --use-checkpoint-args"
    for folders, width in (
        ("--load wide", 16),
        ("--pretrained-checkpoint narrow", 8),
        ("--load wide --pretrained-checkpoint narrow", 16),
        ("--load nowhere --pretrained-checkpoint narrow", 8),
    ):
        assert shown(f"{words} {folders}", capsys)["model"]["hidden_size"] == width
    given = shown(f"{words} --load wide --hidden-size 32", capsys)["model"]
    assert (given["hidden_size"], given["num_layers"]) == (32, 2)
    assert "--use-checkpoint-args: no checkpoint to take the model from: " in shown(
        f"{words} --load nowhere", capsys, 1
    )
    assert (
        "bert/iter_0000001 holds a model of kind bert; train it with megatron-train pretrain b"
        in (shown(f"{words} --load bert", capsys, 1))
    )
    assert "nameless/iter_0000001 has no record of its model; give another" in shown(
        f"{words} --load nameless", capsys, 1
    )


@pytest.mark.usefixtures("folders")
def test_finetuning_takes_model_and_tokenizer_of_its_checkpoint(capsys, tmp_path):
    words = f"finetune gpt {REST} --pretrained-checkpoint"
    found = shown(f"{words} narrow", capsys)
    assert found["model"]["hidden_size"] == 8 and found["model"]["vocab_size"] == 257
    assert found["training"]["task"] == "gpt"
    assert found["data"]["tokenizer_model"].endswith("narrow/iter_0000001/tokenizer")
    own = shown(f"{words} narrow --tokenizer-type ByteTokenizer", capsys)["data"]
    assert own["tokenizer_type"] == "ByteTokenizer" and "tokenizer_model" not in own
    assert "tokenizer_model" not in shown(f"{words} wide", capsys)["data"]
    # The size in a checkpoint has the end-of-document token, which --vocab-size has not.
    null = f"{words} wide --tokenizer-type NullTokenizer"
    assert shown(null, capsys)["model"]["vocab_size"] == 256
    assert shown(f"{null} --vocab-size 257", capsys)["model"]["vocab_size"] == 257
    assert (
        shown(f"{words} narrow --attention-dropout 0", capsys)["training"]
        | {"attention_dropout": 0.1}
        == found["training"]
    )


@pytest.mark.usefixtures("folders")
def test_finetuning_of_another_model_is_refused(capsys, tmp_path):
    words = f"finetune gpt {REST} --pretrained-checkpoint"
    for more, message in (
        (
            "bert",
            "bert/iter_0000001 holds a model of kind bert, but gpt trains gpt and hybrid and ",
        ),
        ("nameless", "--pretrained-checkpoint: nameless/iter_0000001 has no record of its model"),
        ("nowhere", "--pretrained-checkpoint: nowhere"),
        (
            "narrow --hybrid-layer-pattern M*",
            "--hybrid-layer-pattern is not a setting of models of kind gpt, the kind in the check",
        ),
    ):
        assert message in shown(f"{words} {more}", capsys, 1)
    file = tmp_path / "run.yaml"
    for text, message in (
        ("training: {task: gpt}\ncheckpoint: {finetune: false}\n", ""),
        ("training: {task: classification}\n", "training.task is classification, but the command"),
        ("checkpoint: {finetune: true}\n", "checkpoint.finetune is True, but the command is fine"),
    ):
        file.write_text(text)
        found = shown(f"{words} narrow --config {file}", capsys, bool(message))
        assert not message or message in found


@pytest.mark.parametrize("task", ["gpt", "classification"])
def test_flags_of_finetuning_are_those_of_all_models_of_its_task(task):
    options = finetune_options(task)
    keys = {option.key for option in options}
    kinds = {"gpt", "hybrid", "mamba"} | ({"bert"} if task == "classification" else set())
    wanted = {"model.num_layers", "model.hybrid_layer_pattern", "checkpoint.pretrained_checkpoint"}
    assert wanted <= keys and ("model.bert_binary_head" in keys) == ("bert" in kinds)
    assert not keys & {"training.task", "checkpoint.finetune", "checkpoint.use_checkpoint_args"}
    flags = [flag for option in options for flag in (option.flag, option.opposite) if flag]
    assert len(flags) == len(set(flags))
    every = {option.flag for kind in kinds for option in run_options(kind)}
    assert {option.flag for option in options} <= every
    for option in options:
        of_model = option.section == "model"
        assert (option.derived_default == "the checkpoint's") == of_model
        source = option.key == "checkpoint.pretrained_checkpoint"
        assert option.required >= (of_model or source)
    first = next(option for option in run_options("gpt") if option.key == "model.num_layers")
    (own,) = (option for option in options if option.key == first.key)
    assert (own.help, own.flag) == (first.help, first.flag)
    titles = finetune_titles(task)
    assert titles["model"] == "model" and titles.keys() >= {option.section for option in options}
    assert titles["training"] == sections()["training"][0]
