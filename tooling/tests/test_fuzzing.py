"""The fuzzing harness notices what it is for: each kind of fault makes it fail."""

import json
import random

import pytest
from fuzzing import fuzz, mutate_bytes, mutate_json, mutate_text

SEED = json.dumps({"sizes": [1, 2, 3], "name": "a", "parts": {"x": {"start": 0}}}).encode()


def careful(content: bytes) -> None:
    """A reader without faults."""
    try:
        document = json.loads(content)
        sizes = document["sizes"]
        if not all(type(size) is int and 0 <= size < 1000 for size in sizes):
            raise ValueError("sizes")
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("not a document") from None


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_text, mutate_json])
def test_a_careful_reader_passes(mutate) -> None:
    tally = fuzz(careful, [SEED], ValueError, count=200, mutate=mutate)
    assert tally.read + sum(tally.refused.values()) == 200
    assert tally.refused["ValueError"] > 20


def another_error(content: bytes) -> None:
    careful(content)
    json.loads(content)["parts"]["x"]["start"] + 1


def loops(content: bytes) -> None:
    careful(content)
    if json.loads(content).get("name") != "a":
        while True:
            try:
                while True:
                    pass
            except Exception:  # noqa: BLE001 - the limit has to get past it
                continue


def allocates(content: bytes) -> None:
    careful(content)
    if json.loads(content).get("name") != "a":
        bytearray(1 << 31)


def several_lines(content: bytes) -> None:
    try:
        careful(content)
    except ValueError:
        raise ValueError("one\ntwo") from None


def refuses_nothing(content: bytes) -> None:
    del content


def refuses_all(content: bytes) -> None:
    raise ValueError(f"{len(content)} bytes")


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (another_error, "(Key|Type)Error"),
        (loops, "TookTooLong: more than 0.2 s"),
        (allocates, "MemoryError"),
        (several_lines, "no line of error"),
        (refuses_nothing, "none was refused"),
    ],
)
def test_each_kind_of_fault_is_found(read, line: str) -> None:
    with pytest.raises(AssertionError, match=line):
        fuzz(read, [SEED], ValueError, count=200, mutate=mutate_json, cpu_seconds=0.2)


def test_a_seed_has_to_be_read() -> None:
    with pytest.raises(ValueError, match="bytes"):
        fuzz(refuses_all, [SEED], ValueError, count=1)


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_text, mutate_json])
def test_cases_are_the_same_each_time_and_differ_from_each_other(mutate) -> None:
    first, again = ([mutate(random.Random(i), SEED) for i in range(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 40
