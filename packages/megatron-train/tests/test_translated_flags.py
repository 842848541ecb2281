"""Flags of Megatron-LM that matter only together with others, or with a value."""

import pytest
from megatron_train.config.values import GivenValue, Values
from megatron_train.megatron_lm.launch_script import read_script
from megatron_train.megatron_lm.table import megatron_flags
from megatron_train.megatron_lm.translate import apply_megatron_defaults, translate

TABLE = megatron_flags()
QUERIES, SWITCH = ("--num-query-groups", "2"), "--group-query-attention"


def with_defaults(**given):
    """Returns the settings after Megatron-LM's defaults, and the translation with its notes."""
    translation = translate(["--tiktoken-pattern", "v2"], TABLE)
    values = {key.replace("__", "."): value for key, value in given.items()}
    made = {key: GivenValue(value, "--tiktoken-pattern") for key, value in values.items()}
    return apply_megatron_defaults(translation, Values(made)), translation


@pytest.mark.parametrize("order", [0, 1])
def test_query_groups_have_an_effect_with_their_switch_alone(order):
    words = [[*QUERIES, SWITCH], [SWITCH, *QUERIES]][order]
    result = translate(words, TABLE)
    assert set(QUERIES) < set(result.arguments) and not result.notes
    assert result.counts()["accepted"] == 2 and result.counts()["no effect"] == 0
    alone = translate(list(QUERIES), TABLE)
    assert alone.arguments == []
    assert alone.counts()["accepted"] == 0 and alone.counts()["no effect"] == 1


@pytest.mark.parametrize(
    ("given", "activation"),
    [
        ({}, "gelu_tanh"),  # fused with a bias: both are Megatron-LM's defaults
        ({"placement__bias_gelu_fusion": True, "model__add_bias_linear": True}, "gelu_tanh"),
        ({"placement__bias_gelu_fusion": False}, None),
        ({"model__add_bias_linear": False}, None),
        ({"model__activation": "swiglu"}, "swiglu"),
    ],
)
def test_gelu_is_an_approximation_only_if_it_is_fused_with_a_bias(given, activation):
    values, translation = with_defaults(**given)
    assert values.get("model.activation") == activation
    assert any("gelu_tanh" in note for note in translation.notes) == (activation == "gelu_tanh")


@pytest.mark.parametrize("given", [None, True, False])
def test_losses_are_averaged_by_micro_batch_unless_a_script_decides(given):
    key = "training__calculate_per_token_loss"
    values, translation = with_defaults(**({} if given is None else {key: given}))
    assert values.get("training.calculate_per_token_loss") == bool(given)
    said = any("calculate_per_token_loss" in note for note in translation.notes)
    assert said == (given is None)


@pytest.mark.parametrize(
    ("tokenizer", "stays"), [(None, True), ("TikTokenizer", True), ("NullTokenizer", False)]
)
def test_options_of_one_tokenizer_are_left_out_with_another(tokenizer, stays):
    given = {"data__tiktoken_pattern": "v2"}
    given |= {} if tokenizer is None else {"data__tokenizer_type": tokenizer}
    values, translation = with_defaults(**given)
    assert ("data.tiktoken_pattern" in values.given) == stays
    outcomes = translation.flags_by_outcome
    assert ("--tiktoken-pattern" in outcomes["accepted"]) == stays
    assert ("--tiktoken-pattern" in outcomes["no effect"]) == (not stays)
    assert any("no effect with --tokenizer-type" in n for n in translation.notes) == (not stays)


def test_a_flag_of_several_values_needs_one_unless_none_are_allowed():
    flag = "--mrope-section"
    assert "has no value: its variable is empty" in translate([flag], TABLE).errors[0]
    for words in ([flag, "1"], [flag, "1", "2", "3"], ["--data-path"], ["--data-path", "a", "b"]):
        result = translate(words, TABLE)
        assert not result.errors and result.arguments == words


@pytest.mark.parametrize(
    ("value", "read"),
    [("'99,1,0'", "99,1,0"), ('"99,1,0"', "99,1,0"), ("'", "'"), ("'9\"", "'9\""), ("''", "")],
)
def test_quotes_that_a_variable_contained_are_removed_in_pairs(value, read):
    assert translate(["--split", value], TABLE).arguments == ["--split", read]


def test_an_empty_word_is_a_value_and_a_missing_one_is_none():
    assert translate(["--save", ""], TABLE).arguments == ["--save", ""]
    assert translate(["--save="], TABLE).arguments == ["--save", ""]
    assert "has no value" in translate(["--save"], TABLE).errors[0]


@pytest.mark.parametrize(
    ("line", "first"), [("", "a"), ("shift", "b"), ("shift 2", "c"), ("shift 0", "a")]
)
def test_arguments_of_a_script_are_shifted(line, first, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"{line}\npython pretrain_gpt.py --save $1\n")
    assert read_script(script, ["a", "b", "c"]).arguments == ("--save", first)
