"""Recipes build runs of the published sizes, and the command shows and compares them."""

import pytest
from megatron_ckpt import find_family
from megatron_models import parameter_count
from megatron_train.cli import main
from megatron_train.config.files import read_file
from megatron_train.config.recipes import (
    compare_recipes,
    recipe_description,
    recipe_kind,
    recipe_names,
    recipe_text,
    recipe_values,
)
from megatron_train.config.resolve import derive
from megatron_train.config.run import build_run
from megatron_train.config.run_sections import run_options
from megatron_train.config.values import GivenValue, Values

VOCABULARY = {"gpt2-124m": 50257, "megatron-gpt-345m": 50257, "gpt3-175b": 50257}
VOCABULARY |= {"llama-tiny": 1024, "smollm2-135m": 49152, "llama3.2-1b": 128256}
VOCABULARY |= {"deepseek-tiny": 2048, "mistral-tiny": 2048}
VOCABULARY |= {"bert-tiny": 2048, "megatron-bert-345m": 30522}
VOCABULARY |= {"t5-tiny": 2048, "t5-base": 32128}
VOCABULARY |= {"mamba2-tiny": 2048, "mamba2-130m": 50288, "hybrid-tiny": 2048}

# With the published vocabulary, as counted by the models' authors, by transformers or by hand.
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "megatron-gpt-345m": 354_823_168,
    "gpt3-175b": 174_604_259_328,
    "llama-tiny": 1_771_200,
    "smollm2-135m": 134_515_008,
    "llama3.2-1b": 1_235_814_400,
    # Embeddings 2 * 2_048 * 128, attention 35_920 a layer, dense MLP 147_456, experts with router
    # and shared expert 332_800, norms 256; the depth of MTP is one such layer and 33_152.
    "deepseek-tiny": 2_217_104,
    # Embeddings 2 * 2_048 * 128, four layers of 49_152 + 147_456 + 256, final norm 128.
    "mistral-tiny": 1_311_872,
    # Embeddings 128 * (2_048 + 128 + 2), four layers of 12 * 128^2 + 13 * 128, final norm 256, head
    # of masked words 128^2 + 3 * 128 + 2_048, pooler 128^2 + 128, binary head 2 * 128 + 2.
    "bert-tiny": 1_107_714,
    # The same sum with width 1_024, 24 layers and 512 positions.
    "megatron-bert-345m": 336_226_108,
    # Embedding 2_048 * 96, three layers a side: attention 4 * 96^2, feed-forward 3 * 96 * 256,
    # norms 2 * 96, and of the decoder another 4 * 96^2 + 96; final norms 2 * 96, biases 2 * 32 * 4.
    "t5-tiny": 972_640,
    # As transformers counts google-t5/t5-base.
    "t5-base": 222_903_552,
    # Embeddings 2_048 * 128, final norm 128, four layers of in_proj 128 * 648, convolution 384 * 5,
    # scan 3 * 8, norms 256 + 128, out_proj 256 * 128.
    "mamba2-tiny": 734_432,
    # As counted for the published weights.
    "mamba2-130m": 128_989_632,
    # Embeddings 2 * 2_048 * 128, final norm 128, three layers of 118_040 as in mamba2-tiny, one of
    # attention of 49_152 + 128, three of feed-forward of 2 * 384 * 128 + 128.
    "hybrid-tiny": 1_223_112,
}


TOKENIZER = {"data.tokenizer_model": GivenValue("pieces", "--tokenizer-model")}


def build(name, more=None):
    kind = recipe_kind(name)
    values = recipe_values(name, run_options(kind)).updated(
        Values(
            {
                "data.data_path": GivenValue(("corpus",), "--data-path"),
                **(TOKENIZER if kind in ("bert", "t5") else {}),
                "model.vocab_size": GivenValue(VOCABULARY[name], "--vocab-size"),
            }
        )
    )
    values = values.updated(more or Values({}))
    layout = recipe_values(name, run_options(kind)).section("layout")
    ranks = layout.get("tp", 1) * layout.get("pp", 1)
    return build_run(derive(values, kind), ranks, kind)


def test_all_recipes_are_tested_here():
    assert recipe_names() == sorted(VOCABULARY) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_recipe_builds_a_run_of_the_published_size(name):
    run = build(name)
    assert parameter_count(run.model) == PARAMETERS[name]
    assert run.learning_rate_schedule().at(10**9) <= run.optimizer.lr
    family = run.checkpoint.model_family
    assert family is None or find_family(family).differences(run.model) == []
    assert recipe_description(name).endswith(".") and "\n" not in recipe_description(name)


def test_recipes_are_listed_and_shown_as_yaml(tmp_path, capsys):
    assert main(["recipes", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line for line in listed if not line.startswith(" ")] == recipe_names()
    assert main(["recipes", "show", "llama-tiny"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(shown)
    given = read_file(tmp_path / "run.yaml", run_options()).given
    assert {key: g.value for key, g in given.items()} == {
        key: g.value for key, g in recipe_values("llama-tiny", run_options()).given.items()
    }


def test_recipes_and_files_are_compared(tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text(recipe_text("llama-tiny").replace("hidden_size: 192", "hidden_size: 128"))
    assert main(["recipes", "diff", "llama-tiny", str(mine)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["llama-tiny", str(mine)], ["model.hidden_size", "192", "128"]]
    assert main(["recipes", "diff", "llama-tiny", "llama-tiny"]) == 0
    assert capsys.readouterr().out.split() == ["llama-tiny", "llama-tiny"]
    assert main(["recipes", "diff", "llama-tiny", "gpt2-124m"]) == 0
    assert "model.position_embedding_type  rope        learned_absolute" in capsys.readouterr().out


def test_a_file_to_compare_is_known_by_its_ending_or_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings").write_text("training: {seed: 2}\n")
    (tmp_path / "other").write_text("training: {seed: 1234, bf16: true}\n")
    assert compare_recipes("settings", "other") == [
        ("training.seed", 2, 1234),
        ("training.bf16", False, True),
    ]
    for name in ("nowhere.yaml", "nowhere.yml"):
        assert main(["recipes", "diff", "settings", name]) == 1
        assert f"{name}: No such file" in capsys.readouterr().err


def printed(words, capsys):
    assert main(f"pretrain gpt {words} --vocab-size 100 --data-path d --print-config".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line.split(":")[0].strip(): line.split(":", 1)[1] for line in lines if ": " in line}


def test_flags_override_files_which_override_recipes_and_defaults(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: {lr: 1.0, min_lr: 0.5}\n")
    found = printed(f"--recipe llama-tiny --config {path} --lr 2.0", capsys)
    expected = {
        "lr": ("2.0", "--lr"),
        "min_lr": ("0.5", f"{path}: optimizer.min_lr"),
        "adam_beta2": ("0.98", "recipe llama-tiny: optimizer.adam_beta2"),
        "adam_beta1": ("0.9", "default"),
    }
    for name, (value, origin) in expected.items():
        assert found[name].split("#")[0].strip() == value
        assert found[name].split("# ")[1] == origin


def test_llama_tiny_warms_up_and_decays_in_a_run_of_any_length():
    for iterations in (50, 1000, 3000):
        given = {"training.train_iters": GivenValue(iterations, "--train-iters")}
        run = build("llama-tiny", Values(given))
        schedule, samples = run.learning_rate_schedule(), run.train_samples
        assert schedule.at(0) < run.optimizer.lr / 10
        assert schedule.at(round(0.04 * samples)) == pytest.approx(run.optimizer.lr)
        assert schedule.at(samples) == 0


def test_settings_for_another_kind_of_model_are_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "bert.yaml").write_text("kind: bert\nmodel: {num_layers: 2}\n")
    words = ["pretrain", "gpt", "--config", str(tmp_path / "bert.yaml"), "--vocab-size", "9"]
    assert main(words) == 1
    line = capsys.readouterr().err
    assert "bert.yaml is for models of kind bert, not gpt; " in line and line.count("\n") == 1
    assert main(["recipes", "diff", "llama-tiny", str(tmp_path / "bert.yaml")]) == 1
    assert "compare settings of one kind" in capsys.readouterr().err
    (tmp_path / "gpt.yaml").write_text("kind: gpt\nmodel: {num_layers: 2}\n")
    assert main(["config", "check", str(tmp_path / "gpt.yaml")]) == 0


def test_an_unknown_recipe_is_refused_with_the_nearest_name(capsys):
    assert main(["recipes", "show", "llama-tinny"]) == 1
    captured = capsys.readouterr().err
    assert "unknown recipe 'llama-tinny'; did you mean llama-tiny?" in captured
    assert captured.count("\n") == 1
    assert main(["pretrain", "gpt", "--recipe", "gpt"]) == 1


def test_recipes_do_not_repeat_defaults():
    """A recipe repeats a default only if it is a published value of the model."""
    published = {"clip_grad", "weight_decay", "eval_interval", "log_interval"}
    published |= {"max_position_embeddings", "seq_length", "split"}
    for name in recipe_names():
        options = run_options(recipe_kind(name))
        values = recipe_values(name, options).given
        for option in options:
            given = values.get(option.key)
            if given is not None and option.name not in published:
                assert given.value != option.default, f"{name}: {option.key}"


@pytest.mark.parametrize(
    ("more", "family"), [("--num-layers 3", "llama"), ("--num-experts 4", None)]
)
def test_a_model_that_flags_change_does_not_have_the_family_of_its_recipe(capsys, more, family):
    words = f"pretrain gpt --recipe llama-tiny --mock-data --vocab-size 99 --print-config {more}"
    assert main(words.split()) == 0
    printed = capsys.readouterr()
    note = (
        "megatron-train: note: the recipe's model_family llama has no effect: models of this "
        "family have num_experts = 0, this one has 4"
    )
    assert printed.err.startswith("" if family else note)
    if family:
        assert "note" not in printed.err and "model_family: llama" in printed.out
