"""Numbers of any length and form in every numeric field of the OpenAPI document."""

import json
import logging
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from flask.testing import FlaskClient
from megatron_data import ByteTokenizer
from megatron_infer import GenerationService, ServerSettings, create_app
from megatron_infer.server.openapi import openapi_document
from megatron_models import GPT

POSITIONS = 48
DIGITS = (19, 20, 308, 309, 310, 400, 401, 4299, 4300, 4301, 50_000)
NUMBERS = [
    *("9" * digits for digits in DIGITS),
    *("-" + "9" * digits for digits in DIGITS),
    *("1e308", "1e309", "-1e309", "1E+400", "1e99999999999", "-1e99999999999"),
    *("1e-400", "-1e-400", "5e-324", "0.5", "-0.5", "-0.0", "1.0", "1.5", "1e0", "10e-1"),
    *("100.00000000000001", "1.0000000000000001", "-1", "0", "1"),
    "0." + "0" * 5000 + "1",
    "1." + "0" * 5000,
    "1" + "0" * 400 + ".5",
]


def numeric_fields() -> list[tuple[str, str, str, dict[str, Any]]]:
    """Yields method, path, name and schema of every numeric field of a body in the document."""
    document = openapi_document(POSITIONS, needs_token=False)
    found = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
                for name, field in schema["properties"].items():
                    if field["type"] in ("integer", "number"):
                        found.append((method, path, name, field))
                    else:  # a nested number would need a separate test
                        assert '"number"' not in json.dumps(field)
                        assert '"integer"' not in json.dumps(field)
    return found


FIELDS = numeric_fields()


@pytest.fixture(scope="module")
def client(make_model: Callable[..., GPT]) -> Iterator[FlaskClient]:
    model = make_model(vocab_size=257, positions=POSITIONS)
    service = GenerationService(model, ByteTokenizer())
    yield create_app(service, ServerSettings(), {}).test_client()
    service.close()


def allowed(text: str, field: dict[str, Any]) -> bool:
    """Returns whether the schema allows a number; integers are exact, all others float64."""
    whole = text.removeprefix("-").isdigit()
    value = Decimal(text) if whole else Decimal(float(text))
    return (
        value <= Decimal(field["maximum"])
        and value >= Decimal(field.get("minimum", "-Infinity"))
        and value > Decimal(field.get("exclusiveMinimum", "-Infinity"))
        and (field["type"] == "number" or value % 1 == 0)
    )


def test_the_document_has_numbers_to_try() -> None:
    assert {name for _, _, name, _ in FIELDS} >= {"tokens_to_generate", "temperature", "top_k"}
    assert {path for _, path, _, _ in FIELDS} == {"/api", "/api/stream"}


@pytest.mark.parametrize(
    ("method", "path", "name", "field"), FIELDS, ids=[f"{one[1]}-{one[2]}" for one in FIELDS]
)
def test_numbers_of_any_length_are_accepted_or_refused_by_name(
    client: FlaskClient,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    name: str,
    field: dict[str, Any],
) -> None:
    accepted = 0
    with caplog.at_level(logging.ERROR):
        for text in NUMBERS:
            others = '"tokens_to_generate": 1, ' if name != "tokens_to_generate" else ""
            body = f'{{"prompts": ["a"], "logprobs": true, {others}"{name}": {text}}}'
            answer = client.open(path, method=method, data=body, content_type="application/json")
            expected = 200 if allowed(text, field) else 400
            assert answer.status_code == expected, (text[:30], len(text))
            if expected == 400:
                message = answer.get_json()["message"]
                assert message.startswith(f"{name} must "), message
                assert len(message) < 150
            elif path == "/api/stream":
                assert "event: done" in answer.get_data(as_text=True)
            accepted += expected == 200
    assert accepted
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "+1", "01", "1.", ".5", "0x1", "1_0"]
)
def test_invalid_json_numbers_are_refused(client: FlaskClient, text: str) -> None:
    body = f'{{"prompts": ["a"], "temperature": {text}}}'
    answer = client.put("/api", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert "not JSON" in answer.get_json()["message"]
