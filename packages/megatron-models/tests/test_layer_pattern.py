import pytest
from megatron_models.layer_pattern import PatternError, layer_pattern


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
