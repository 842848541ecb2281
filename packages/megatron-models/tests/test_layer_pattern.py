import pytest
from megatron_models.layer_pattern import (
    PatternError,
    layer_pattern,
    pattern_text,
    skipping_pattern,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", "1111"),
        ("2", "1010"),
        ("3", "1001"),
        ("[0,1,1,0]", "0110"),
        ("[0]+[1]*3", "0111"),
        ("([0]*1+[1])*2", "0101"),
        ("2*[1, 0]", "1010"),
        ("4", "1000"),
        ("9", "1000"),
        ("[]+[1]*4", "1111"),
        ("0*[1]+[0]*4", "0000"),
    ],
)
def test_patterns_in_megatrons_syntax(text, expected):
    assert layer_pattern(text, 4) == tuple(each == "1" for each in expected)


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "",
        "[1]*3",
        "[2]*4",
        "[1]*4*10**9",
        "x",
        "__import__('os')",
        "[1]*[1]",
        "[",
        "1.5",
    ],
)
def test_invalid_patterns_are_refused_in_one_line(text):
    with pytest.raises(PatternError) as caught:
        layer_pattern(text, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", "00000"),
        ("2", "10101"),
        ("3", "11011"),
        ("5 ", "11110"),
        ("6", "11111"),
        ("[0,1,1,0,1]", "01101"),
    ],
)
def test_a_number_names_the_layers_that_are_skipped(text, expected):
    assert skipping_pattern(text, 5) == tuple(each == "1" for each in expected)
    assert pattern_text(each == "1" for each in "0110") == "[0, 1, 1, 0]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "0 is not a pattern of layers; give a number of at least 1"),
        ("[1]*3", r"the pattern \[1\]\*3 has 3 layers, but the model has 5; give one number for"),
        ("[1]-[0]", "'.1.-.0.' is not a pattern of layers; give a number, or lists"),
        ("2+[1]", "is not a pattern of layers"),
        ("[1]+2", "is not a pattern of layers"),
        ("2+2", "is not a pattern of layers"),
        ("True", "is not a pattern of layers"),
        ("[[1]]", "is not a pattern of layers"),
    ],
)
def test_other_expressions_are_no_patterns(text, words):
    with pytest.raises(PatternError, match=words):
        skipping_pattern(text, 5)


def test_lists_have_at_most_100000_layers_and_long_texts_are_cut():
    assert layer_pattern("[1]*100000", 100_000) == (True,) * 100_000
    with pytest.raises(PatternError, match="is not a pattern of layers"):
        layer_pattern("[1]*100001", 100_001)
    for length, end in ((200, ""), (201, "...")):
        with pytest.raises(PatternError) as caught:
            layer_pattern("x" * length, 4)
        assert str(caught.value).startswith(f"'{'x' * 200}{end}' is not a pattern")
