"""Errors about settings, with the names of fields or of the flags that set them."""

import pickle
from dataclasses import dataclass

import pytest
import torch
from megatron_parallel.errors import FieldError, backend_text, rank_list
from megatron_parallel.host_copy import HostCopy, to_device
from megatron_parallel.memory import is_out_of_memory

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


@pytest.mark.parametrize("length", [199, 200, 201, 5000])
def test_long_values_are_cut_at_200_characters(length: int) -> None:
    text = "x" * length
    shown = text if length <= 200 else "x" * 197 + "..."
    assert str(FieldError("{a}", {"a": text})) == f"a {shown}"
    quoted = "'" + "x" * (length - 2) + "'"
    shown = quoted if length <= 200 else quoted[:197] + "..."
    assert str(FieldError("{a:repr}", {"a": "x" * (length - 2)})) == shown


def test_words_may_come_before_an_error() -> None:
    error = FieldError("{size} is odd", FIELDS).prefixed("layer 3: ")
    assert type(error) is FieldError and str(error) == "layer 3: size 96 is odd"
    assert error.format_message({"size": "--size"}) == "layer 3: --size 96 is odd"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 2], "ranks 0, 2"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
        (range(4), "ranks 0-3"),
    ],
)
def test_ranks_are_listed_as_spans(ranks: list[int], text: str) -> None:
    assert rank_list(ranks) == text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("[../gloo/pair.cc:1] Connection closed by peer. See the log", "Connection closed by peer"),
        ("Broken.\nmore", "Broken"),
        ("a.b is lost", "a.b is lost"),
        ("", "RuntimeError"),
    ],
)
def test_the_first_sentence_of_a_backend_is_shown(message: str, text: str) -> None:
    assert backend_text(RuntimeError(message)) == text


def test_errors_of_full_memory_are_those_of_hosts_and_devices() -> None:
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    for error in (MemoryError(), torch.OutOfMemoryError("full"), RuntimeError(text)):
        assert is_out_of_memory(error)
    for other in (RuntimeError("another"), ValueError(text), KeyError("a")):
        assert not is_out_of_memory(other)


def test_a_copy_on_the_host_has_arrived_and_does_not_change() -> None:
    values = torch.ones(2, requires_grad=True)
    copied = HostCopy(values)
    with torch.no_grad():
        values.zero_()
    assert copied.arrived and copied.read().tolist() == [1.0, 1.0]
    assert not copied.read().requires_grad
    assert to_device(values, "cpu") is values
