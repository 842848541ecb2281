"""Options are read from dataclasses and convert values."""

from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Literal

import pytest
from megatron_train.config.flags import Parser, add_options, describe
from megatron_train.config.options import Option, options_of
from megatron_train.config.run_sections import run_options
from megatron_train.errors import TrainError

TITLE = {"s": "section"}


@dataclass(frozen=True)
class Sample:
    steps: int = field(metadata={"help": "how many", "unit": "steps"})
    rate: float = 0.1
    style: Literal["linear", "cosine"] = "linear"
    fast: bool = False
    bias: bool = field(default=True, metadata={"flag": "--disable-bias-linear"})
    bar: bool = True
    no_load: bool = False
    paths: tuple[str, ...] | None = None
    hidden: int = field(default=1, metadata={"flag": None})


def options() -> dict[str, Option]:
    return {option.name: option for option in options_of(Sample, "sample")}


def test_records_describe_fields():
    found = options()
    assert list(found) == ["steps", "rate", "style", "fast", "bias", "bar", "no_load", "paths"]
    assert found["steps"].required and found["steps"].unit == "steps"
    assert found["style"].choices == ("linear", "cosine")
    assert found["paths"].repeated and found["paths"].optional
    assert found["rate"].flag == "--rate"


def test_bounds_of_a_field_are_part_of_its_record():
    bounds = {option.name: option.bounds for option in run_options("mamba")}
    assert bounds["mamba_conv_kernel"] == "at least 1, at most 64"
    assert bounds["mamba_num_heads"] == "at least 0"  # 0: derived
    assert bounds["norm_epsilon"] == "above 0"
    assert bounds["final_logit_softcapping"] == "at least 0"
    assert bounds["global_batch_size"] == ""


def test_a_switch_has_a_flag_for_each_value():
    found = options()
    assert (found["fast"].flag, found["fast"].opposite) == ("--fast", "--no-fast")
    assert (found["bias"].flag, found["bias"].opposite) == ("--disable-bias-linear", "--bias")
    assert (found["bar"].flag, found["bar"].opposite) == ("--no-bar", "--bar")
    assert (found["no_load"].flag, found["no_load"].opposite) == ("--no-load", "--load")
    assert found["fast"].flag_value() is True
    assert found["no_load"].flag_value() is True
    assert found["bias"].flag_value() is False
    assert found["bias"].command_line(True) == "--bias"


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("steps", "12", 12),
        ("steps", 12.0, 12),
        ("steps", str(2**63 - 1), 2**63 - 1),
        ("steps", 1 - 2**63, 1 - 2**63),
        ("rate", "1e-4", 1e-4),
        ("rate", 1, 1.0),
        ("paths", "a", ("a",)),
        ("paths", ["a", "b"], ("a", "b")),
        ("paths", [0.3, "a", 1, "b"], ("0.3", "a", "1", "b")),
        ("paths", None, None),
        ("style", "cosine", "cosine"),
        ("fast", True, True),
    ],
)
def test_values_are_converted_to_the_type_of_the_field(name, value, result):
    coerced = options()[name].coerce(value, "here")
    assert coerced == result and type(coerced) is type(result)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", "twelve", "here needs an integer, got 'twelve'"),
        ("steps", 1.5, "here needs an integer, got 1.5"),
        ("steps", True, "here needs an integer, got True"),
        ("steps", None, "here needs an integer, got nothing"),
        ("steps", 2**63, f"here needs an integer, got {2**63}"),
        ("steps", -(2**63), f"here needs an integer, got {-(2**63)}"),
        ("steps", "1e3", "here needs an integer, got '1e3'"),
        ("steps", float("inf"), "here needs an integer, got inf"),
        ("steps", float("nan"), "here needs an integer, got nan"),
        ("steps", [1], "here needs an integer, got [1]"),
        ("paths", ["a", "b\0"], r"here needs text, got 'b\x00'"),
        ("paths", "\ud800", r"here needs text, got '\ud800'"),
        ("rate", "fast", "here needs a number, got 'fast'"),
        ("fast", "yes", "here needs a switch, got 'yes'"),
        ("paths", [True], "here needs text, got True"),
        (
            "style",
            "cosinus",
            "here needs one of linear, cosine, got 'cosinus'; did you mean cosine?",
        ),
    ],
)
def test_values_of_other_types_are_refused_with_origin_and_value(name, value, message):
    with pytest.raises(TrainError) as caught:
        options()[name].coerce(value, "here")
    assert str(caught.value) == message


def test_a_field_type_that_is_not_supported_is_a_type_error():
    @dataclass
    class Bad:
        values: dict[str, int]

    with pytest.raises(TypeError, match=r"bad\.values"):
        options_of(Bad, "bad")


@dataclass(frozen=True)
class Described:
    steps: int = field(metadata={"help": "how many", "unit": "steps", "positive": True})
    rate: float = field(default=0.1, metadata={"help": "rate", "maximum": 3, "positive": True})
    count: int = field(default=0, metadata={"help": "count", "nonnegative": True, "maximum": 9999})
    fast: bool = field(default=False, metadata={"help": "fast"})
    bar: bool = field(default=True, metadata={"help": "bar"})
    mean: bool = field(default=True, metadata={"help": "mean", "flag": "--mean"})
    paths: tuple[str, ...] | None = field(default=None, metadata={"help": "paths"})
    names: tuple[str, ...] = field(default=("a", "b"), metadata={"help": "names", "unit": "path"})
    text: str = field(default="", metadata={"help": "text"})


def test_help_has_unit_bounds_and_default():
    assert [describe(option) for option in options_of(Described, "s")] == [
        "how many [steps, at least 1, required]",
        "rate [above 0, at most 3, default 0.1]",
        "count [at least 0, at most 9,999, default 0]",
        "fast",
        "turn off: bar",
        "mean [on unless --no-mean]",
        "paths",
        "names [default a b]",
        "text",
    ]
    ours = {option.key: describe(option) for option in run_options()}
    assert ours["model.vocab_size"].endswith("default the tokenizer's]")


@pytest.mark.parametrize(
    ("hint", "length", "braces"),
    [
        (str, 78, True),
        (str, 79, False),
        # argparse shows the choices of several values twice
        (tuple[str, ...], 38, True),
        (tuple[str, ...], 39, False),
    ],
)
def test_choices_that_are_too_long_for_a_line_are_in_the_help(hint, length, braces, monkeypatch):
    """With the braces, up to 80 columns stand after a flag."""
    monkeypatch.setenv("COLUMNS", "200")
    choice = "x" * length
    value = field(default=None, metadata={"choices": (choice,), "help": "a value"})
    parser = Parser(prog="tool")
    add_options(parser, options_of(make_dataclass("Section", [("value", hint, value)]), "s"), TITLE)
    text = "".join(parser.format_help().partition("section:")[2].split())  # breaks long words
    assert text.startswith(f"--value{{{choice}}}" if braces else "--valueKIND")
    assert text.endswith("avalue" if braces else f"{choice}:avalue")


@pytest.mark.parametrize(
    ("hint", "default", "required", "optional"),
    [
        (int, {}, True, False),
        (int | None, {}, True, True),
        (int, {"default": 1}, False, False),
        (int, {"default": None}, False, True),
        (int | None, {"default": 1}, False, True),
        (tuple[int, ...], {"default_factory": lambda: (1, 2)}, False, False),
    ],
)
def test_a_setting_is_required_without_a_default_and_may_be_unset_if_its_type_or_default_is(
    hint, default, required, optional
):
    made = make_dataclass("Section", [("value", hint, field(**default))])
    (option,) = options_of(made, "section")
    assert (option.required, option.optional) == (required, optional)
    assert option.default == ((1, 2) if "default_factory" in default else default.get("default"))


@pytest.mark.parametrize(
    ("hint", "kind", "repeated", "optional", "choices"),
    [
        (int | float, "number", False, False, ()),
        (int | float | None, "number", False, True, ()),
        (Path, "text", False, False, ()),
        (Path | None, "text", False, True, ()),
        (tuple[Path, ...], "text", True, False, ()),
        (tuple[Literal["a", "b"], ...] | None, "text", True, True, ("a", "b")),
        (Literal[1, 2], "integer", False, False, (1, 2)),
        (bool, "switch", False, False, ()),
    ],
)
def test_the_kind_of_a_setting_is_that_of_its_type(hint, kind, repeated, optional, choices):
    (option,) = options_of(make_dataclass("Section", [("value", hint)]), "section")
    found = (option.kind, option.repeated, option.optional, option.choices)
    assert found == (kind, repeated, optional, choices)


@pytest.mark.parametrize("hint", [int | str, int | str | None, list[int], bytes, tuple[bytes, ...]])
def test_a_setting_of_several_types_or_of_another_is_an_error_of_its_class(hint):
    with pytest.raises(TypeError, match=r"^section\.value: a setting cannot have the type "):
        options_of(make_dataclass("Section", [("value", hint)]), "section")


def test_a_setting_is_written_as_arguments():
    found = {option.name: option for option in options_of(Described, "s")}
    assert found["names"].command_line(("x", "y")) == "--names x y"
    assert found["rate"].command_line(0.5) == "--rate 0.5"
    assert [found["bar"].command_line(value) for value in (True, False)] == ["--bar", "--no-bar"]


@pytest.mark.parametrize("value", ["nan", "inf", "-Infinity", float("nan"), float("inf")])
def test_numbers_must_be_finite(value):
    numbers = [option for option in run_options() if option.kind == "number"]
    assert len(numbers) > 10
    for option in numbers:
        with pytest.raises(TrainError, match=f"^{option.flag} needs a finite number, got "):
            option.coerce(value, option.flag)


def test_empty_text_is_the_value_of_an_option_whose_default_is_empty():
    @dataclass
    class Section:
        pattern: str = ""
        name: str = "x"

    pattern, name = options_of(Section, "s")
    assert pattern.coerce("", "a.yaml: s.pattern") == ""
    with pytest.raises(TrainError, match=r"s\.name needs text, got ''"):
        name.coerce("", "a.yaml: s.name")


@pytest.mark.parametrize(
    ("name", "flag", "opposite", "sets"),
    [
        ("mmap", "--no-mmap", "--mmap", False),
        ("no_load_optim", "--no-load-optim", "--load-optim", True),
        ("bert_binary_head", "--bert-no-binary-head", "--bert-binary-head", False),
        ("no_reshard_after", "--fsdp-no-reshard-after", "--fsdp-reshard-after", True),
        ("add_bias_linear", "--disable-bias-linear", "--add-bias-linear", False),
        ("notes", "--notes", "--no-notes", True),
    ],
)
def test_a_switch_turns_off_by_a_negative_word_that_its_field_does_not_have(
    name, flag, opposite, sets
):
    switch = field(default=False, metadata={"flag": flag, "help": "a switch"})
    (option,) = options_of(make_dataclass("Section", [(name, bool, switch)]), "section")
    assert (option.flag, option.opposite, option.flag_value()) == (flag, opposite, sets)
