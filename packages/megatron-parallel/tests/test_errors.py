"""Errors about settings, with the names of fields or of the flags that set them."""

import pickle
from dataclasses import dataclass

from megatron_parallel.errors import FieldError

FIELDS = {"size": 96, "heads": 5, "style": "{odd}"}


def test_an_error_names_fields_or_their_replacements() -> None:
    error = FieldError("{size} is no multiple of {heads:=}; change {size:name}", FIELDS)
    assert str(error) == "size 96 is no multiple of heads=5; change size"
    flags = {"size": "--hidden-size", "heads": "--heads"}
    assert (
        error.format_message(flags)
        == "--hidden-size 96 is no multiple of --heads 5; change --hidden-size"
    )
    assert error.format_message({"heads": "x.yaml: heads"}).startswith(
        "size 96 is no multiple of x.yaml: "
    )


def test_values_and_plain_messages_may_hold_braces() -> None:
    assert str(FieldError("{style:name} is {style:repr}", FIELDS)) == "style is '{odd}'"
    assert str(FieldError('not {"a": 1}')) == FieldError('not {"a": 1}').format_message({"a": "b"})


def test_an_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(FieldError("{style} is odd", FIELDS)))
    assert str(error) == "style {odd} is odd"


def test_the_fields_of_a_dataclass_are_its_variables() -> None:
    @dataclass(frozen=True)
    class Shape:
        size: int

    assert str(FieldError("{size} is odd", vars(Shape(3)))) == "size 3 is odd"
