"""A body is accepted if and only if its schema and the checks beyond the schema allow it."""

import json
import math
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_infer.server.fields import (
    REFUSED,
    GenerateRequest,
    RequestError,
    _shown,
    parse_request,
    request_schema,
)

SCHEMA = request_schema(64)
GOOD: dict[str, Any] = {"prompts": ["a"]}

REFUSALS = [
    (b"", "not JSON"),
    (b"\xff", "not JSON"),
    (b'{"prompts": ["a"], "temperature": NaN}', "NaN"),
    (b'{"prompts": ["a"], "prompts": ["b"]}', "twice"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompts": ["a"], "random_seed": ' + b"9" * 5000 + b"}", "beyond 1.8e308"),
    (b'{"prompts": ["a"], "top_k": -' + b"9" * 5000 + b"}", "below -1.8e308"),
    (b'{"prompts": ["a"], "top_k": ' + b"9" * 401 + b"}", "not a number beyond 1.8e308"),
    (b'{"prompts": ["a"], "top_k": ' + b"8" * 400 + b"}", f"1000, not {'8' * 40}..."),
    (b'{"prompts": ["a"], "top_k": -' + b"8" * 400 + b"}", "not a number below -1.8e308"),
    (b'{"prompts": ["a"], "top_k": -' + b"8" * 399 + b"}", f"1000, not -{'8' * 39}..."),
    (b'{"prompts": ' + b"[" * 300 + b"]" * 300 + b"}", "prompts[0] must be a string"),
    ([], "must be a JSON object"),
    ({}, "prompts is missing"),
    ({"prompts": "a"}, "prompts must be a list of strings"),
    ({"prompts": []}, "1 to 128 texts, not 0"),
    ({"prompts": ["a"] * 129}, "1 to 128 texts, not 129"),
    ({"prompts": ["a", 2]}, "prompts[1] must be a string, not 2"),
    ({"prompts": [""]}, "prompts[0] is empty, which needs add_BOS"),
    (b'{"prompts": ["\\ud800"]}', "prompts[0] has an unpaired surrogate"),
    ({"tokens_to_generate": "many"}, 'tokens_to_generate must be an integer, not "many"'),
    ({"tokens_to_generate": True}, "tokens_to_generate must be an integer, not true"),
    ({"tokens_to_generate": 1.5}, "tokens_to_generate must be an integer, not 1.5"),
    ({"tokens_to_generate": -1}, "tokens_to_generate must lie in 0 to 64, not -1"),
    ({"tokens_to_generate": 65}, "tokens_to_generate must lie in 0 to 64, not 65"),
    ({"tokens_to_generate": 0}, "needs logprobs"),
    ({"temperature": 0}, "temperature must be greater than 0"),
    ({"temperature": 100.5}, "temperature must lie in 0 to 100"),
    (b'{"prompts": ["a"], "temperature": 1e999}', "temperature must lie in 0 to 100"),
    ({"top_k": 1001}, "top_k must lie in 0 to 1000"),
    ({"top_p": 1.01}, "top_p must lie in 0 to 1"),
    ({"top_p": 0.5, "top_k": 5}, "top_k and top_p exclude each other"),
    ({"top_k": -1}, "top_k must lie in 0 to 1000, not -1"),
    ({"top_p": -0.01}, "top_p must lie in 0 to 1, not -0.01"),
    ({"random_seed": 2**53}, "random_seed must lie in 0 to 9007199254740991"),
    ({"logprobs": 1}, "logprobs must be true or false, not 1"),
    ({"random_seed": -1}, "random_seed must lie in 0 to"),
    ({"random_seed": None}, "random_seed must be an integer, not null"),
    ({"temprature": 1}, '"temprature" is not a field; known: prompts'),
]


@pytest.mark.parametrize(("body", "names"), REFUSALS, ids=[names for _, names in REFUSALS])
def test_errors_are_named_in_one_line(body: Any, names: str) -> None:
    if isinstance(body, dict) and body and "prompts" not in body:
        body = GOOD | body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as refused:
        parse_request(content, SCHEMA)
    assert refused.value.status == 400
    assert names in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is not supported: ") as refused:
        parse_request(json.dumps(GOOD | {name: 1}).encode(), SCHEMA)
    assert refused.value.status == 400


def test_defaults_are_those_of_the_schema() -> None:
    request = parse_request(json.dumps(GOOD).encode(), SCHEMA)
    assert request == GenerateRequest(prompts=("a",))
    for name, field in SCHEMA["properties"].items():
        if "default" in field:
            assert getattr(request, name) == field["default"]


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 0.0, 1.0, 64, 64.0, 100, 1000, 2**53, 2**53 - 1]),
)
VALUES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=3), st.lists(st.text()))


@settings(deadline=None)
@given(
    body=st.fixed_dictionaries(
        {"prompts": st.one_of(st.just(["a"]), st.lists(st.text(max_size=3), max_size=3), VALUES)},
        optional={name: VALUES for name in SCHEMA["properties"] if name != "prompts"},
    )
)
def test_a_body_is_accepted_exactly_if_the_schema_allows_it(body: dict[str, Any]) -> None:
    """Compares the published schema with the parser: both refuse and accept the same bodies."""
    allowed = jsonschema.Draft202012Validator(SCHEMA).is_valid(body)
    together = allowed and (
        not (body.get("top_k", 0) > 0 and body.get("top_p", 0) > 0)
        and not (body.get("tokens_to_generate", 64) == 0 and not body.get("logprobs", False))
        and (body.get("add_BOS", False) or all(body["prompts"]))
    )
    try:
        request = parse_request(json.dumps(body).encode(), SCHEMA)
    except RequestError:
        assert not together
    else:
        assert together
        for name, value in body.items():
            understood = getattr(request, name)
            same = tuple(value) if isinstance(value, list) else value
            assert understood == same or math.isclose(understood, same)


def test_the_largest_seed_is_exact_in_every_language() -> None:
    body = json.dumps(GOOD | {"random_seed": 9007199254740991}).encode()
    assert parse_request(body, SCHEMA).random_seed == 2**53 - 1


@pytest.mark.parametrize(("letters", "shown"), [(38, '"' + "y" * 38 + '"'), (39, '"' + "y" * 39)])
def test_a_value_in_a_message_has_at_most_40_characters(letters: int, shown: str) -> None:
    body = json.dumps(GOOD | {"top_k": "y" * letters}).encode()
    dots = "..." if letters > 38 else ""
    with pytest.raises(RequestError) as refused:
        parse_request(body, SCHEMA)
    assert str(refused.value) == f"top_k must be an integer, not {shown}{dots}"


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"),
    [(0, 0.5, True), (5, 0.0, True), (0, 0.0, True), (1, 0.5, False), (1, 1.0, False)],
)
def test_only_one_of_top_k_and_top_p_limits_the_tokens(
    top_k: int, top_p: float, allowed: bool
) -> None:
    body = json.dumps(GOOD | {"top_k": top_k, "top_p": top_p}).encode()
    if allowed:
        found = parse_request(body, SCHEMA)
        assert (found.top_k, found.top_p) == (top_k, top_p)
        return
    with pytest.raises(RequestError, match="top_k and top_p exclude each other"):
        parse_request(body, SCHEMA)


def test_one_of_top_k_and_top_p_turns_the_other_off() -> None:
    """0 is no limit for both."""
    for fields, expected in (({"top_k": 3}, (3, 0.0)), ({"top_p": 0.5}, (0, 0.5))):
        found = parse_request(json.dumps(GOOD | fields).encode(), SCHEMA)
        assert (found.top_k, found.top_p) == expected


def test_a_request_may_have_128_prompts() -> None:
    prompts = [str(number) for number in range(128)]
    assert parse_request(json.dumps({"prompts": prompts}).encode(), SCHEMA).prompts == (*prompts,)


def test_a_value_that_json_cannot_write_has_words_in_a_message() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert _shown(value) == "a deeply nested value"
