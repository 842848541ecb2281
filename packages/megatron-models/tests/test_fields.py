"""Fields of configurations: the types and ranges that their metadata describe, on both sides."""

import math
from dataclasses import dataclass, field, fields
from typing import Literal

import pytest
from megatron_models import ConfigError
from megatron_models.components.fields import ComponentConfig, check_divisible, flag, literal


@dataclass(frozen=True, kw_only=True)
class Part(ComponentConfig):
    """A component with a field of each kind."""

    free: int = 3
    size: int = field(default=4, metadata=flag("--size", "", positive=True))
    count: int = field(default=0, metadata=flag("--count", "", nonnegative=True, maximum=9))
    auto: int = field(default=0, metadata=flag("--auto", "", positive=True, derived=True))
    rate: float = field(default=0.5, metadata=flag("--rate", "", positive=True, maximum=1))
    bias: float = field(default=0.0, metadata=flag("--bias", "", nonnegative=True))
    scale: float = 1.0
    shape: tuple[int, ...] = ()
    mode: Literal["sum", "mean"] = "sum"
    on: bool = False
    word: str = ""


@dataclass(frozen=True, kw_only=True)
class Needed(ComponentConfig):
    """A component with numbers that have no defaults."""

    width: float = field(metadata=flag("--width", "", positive=True))
    depth: float = field(metadata=flag("--depth", "", nonnegative=True))


ACCEPTED = [
    {"free": 2**40},
    {"free": -(2**50)},
    {"size": 1},
    {"count": 0},
    {"count": 9},
    {"auto": 0},
    {"auto": 1},
    {"rate": 1.0},
    {"rate": 5e-324},
    {"bias": 0.0},
    {"bias": 1e300},
    {"scale": math.inf},
    {"scale": -math.inf},
    {"shape": (1, -2)},
    {"mode": "mean"},
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_values_at_their_bounds_are_accepted_as_they_are(values) -> None:
    part = Part(**values)
    for name, value in values.items():
        assert getattr(part, name) == value
        assert type(getattr(part, name)) is type(value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"free": 2**40 + 1}, f"free is {2**40 + 1}, more than {2**40}; use {2**40} or less"),
        ({"size": 0}, "size must be a positive number, not 0; use 1 or more"),
        ({"size": -1}, "size must be a positive number, not -1; use 1 or more"),
        ({"count": -1}, "count must be a number of at least 0, not -1; use 0 or more"),
        ({"count": 10}, "count is 10, more than 9; use 9 or less"),
        ({"auto": -1}, "auto must be a positive number, not -1; use 1 or more"),
        ({"rate": 0.0}, "rate must be a positive number, not 0.0; the default is 0.5"),
        ({"rate": math.nan}, "rate must be a positive number, not nan; the default is 0.5"),
        ({"rate": 1.5}, "rate is 1.5, more than 1; use 1 or less"),
        ({"bias": -0.1}, "bias must be a number of at least 0, not -0.1; the default is 0.0"),
        ({"bias": math.inf}, "bias must be a number of at least 0, not inf; the default is 0.0"),
        ({"free": True}, "free must be an integer, not True"),
        ({"free": 1.0}, "free must be an integer, not 1.0"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"word": None}, "word must be text, not None"),
        ({"scale": "1"}, "scale must be a number, not '1'"),
        ({"scale": True}, "scale must be a number, not True"),
        ({"shape": 3}, "shape must be a list of integers, not 3"),
        ({"shape": [1, 2.0]}, "shape must be a list of integers, not [1, 2.0]"),
        ({"shape": (True,)}, "shape must be a list of integers, not (True,)"),
        ({"mode": "maen"}, "mode is 'maen', not one of sum, mean; did you mean 'mean'?"),
        ({"mode": "product"}, "mode is 'product', not one of sum, mean"),
    ],
    ids=str,
)
def test_other_values_are_refused_with_a_remedy(values, message) -> None:
    with pytest.raises(ConfigError) as caught:
        Part(**values)
    assert str(caught.value) == message
    (name,) = values
    renamed = caught.value.format_message({name: f"--{name}"})
    assert renamed.startswith(f"--{name} ")


def test_a_number_without_a_default_names_the_least_value() -> None:
    with pytest.raises(ConfigError, match=r"not 0\.0; use 1 or more"):
        Needed(width=0.0, depth=0.0)
    with pytest.raises(ConfigError, match=r"not -1\.0; use 0 or more"):
        Needed(width=1.0, depth=-1.0)


@pytest.mark.parametrize("value", [7, -7, 0, 2**1000 - 1, 1 - 2**1000])
def test_an_integer_for_a_number_is_converted(value) -> None:
    scale = Part(scale=value).scale
    assert type(scale) is float and scale == float(value)


@pytest.mark.parametrize("value", [2**1000, -(2**1000)])
def test_an_integer_of_a_thousand_bits_is_no_number(value) -> None:
    with pytest.raises(ConfigError, match=r"scale must be a number, not -?10715"):
        Part(scale=value)


def test_a_list_of_integers_becomes_a_tuple() -> None:
    assert Part(shape=[3, 0]).shape == (3, 0)
    assert Part(shape=[]).shape == ()


def test_only_a_value_of_zero_is_derived() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Filled(Part):
        def _fill(self) -> None:
            super()._fill()
            self._set("auto", 2 * self.size)
            self._set("free", -1)

    assert (Filled().auto, Filled().free, Filled(free=0).free) == (8, 3, -1)
    assert Filled(auto=1).auto == 1


def test_metadata_hold_only_what_is_set() -> None:
    assert flag("--a", "text") == {"flag": "--a", "help": "text"}
    every = {
        **dict.fromkeys(("positive", "nonnegative", "derived", "no_effect"), True),
        **dict.fromkeys(("objective", "head"), True),
        "maximum": 7,
        "small": 2,
    }
    assert flag("--a", "text", **every, unit="tokens") == {
        "flag": "--a",
        "help": "text",
        "unit": "tokens",
        **every,
    }


def test_a_component_has_the_values_of_the_model_with_changes() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Model(ComponentConfig):
        free: int = 11
        size: int = 12
        other: int = 13

    part = Model().component(Part, size=5)
    assert (part.free, part.size, part.count) == (11, 5, 0)
    assert {each.name for each in fields(part)} == {each.name for each in fields(Part)}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_a_size_that_the_axis_divides_is_accepted(parts) -> None:
    check_divisible(Part(size=12), "size", "tp", parts)


def test_a_size_that_the_axis_does_not_divide_names_the_nearest_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        check_divisible(Part(size=12), "size", "tp", 5, "the half of ")
    assert str(caught.value) == (
        "tp 5 cannot cut the half of size 12 into 5 equal parts; use tp 4 or 6, or size 10 or 15"
    )
    assert str(caught.value.format_message({"tp": "--tp", "size": "--size"})) == (
        "--tp 5 cannot cut the half of --size 12 into 5 equal parts; use --tp 4 or 6, or --size "
        "10 or 15"
    )


def test_braces_of_a_value_are_printed_as_they_are() -> None:
    assert str(ConfigError(f"{{size}} with {literal('{a}')}", {"size": 1})) == "size 1 with {a}"
    assert literal(3) == "3"
