"""Hundreds of malformed requests, generated from the server's OpenAPI document."""

import http.client
import json
import time
from collections import Counter
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def just_outside(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Yields values at and beyond the limits of a property's schema, and of other types."""
    values: list[Any] = [None, "", "1", [], {}, True, -1, 0, 0.5, 2**63, -(2**70), 1e308]
    for key, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
        if key in schema:
            values += [schema[key] + step, schema[key] + step * 1e-6, float(schema[key])]
    if schema["type"] == "array":
        values += [["x"] * (schema["maxItems"] + 1), [1], [None], [["x"]], ["x", 5], "x", [""]]
        values += [["\ud800"], ["\x00"], ["x" * 5000]]
    return st.sampled_from(values) | ANYTHING


def bodies(schema: dict[str, Any], example: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Yields bodies that violate the schema or are not JSON."""
    properties = schema["properties"]
    changed = st.fixed_dictionaries(
        {}, optional={name: just_outside(value) for name, value in properties.items()}
    )
    added = st.dictionaries(st.text(max_size=12), ANYTHING, max_size=2)
    validator = jsonschema.Draft202012Validator(schema)
    objects = st.builds(lambda one, two: example | one | two, changed, added | st.just({}))
    broken = (objects | ANYTHING).filter(lambda body: not validator.is_valid(body))
    texts = broken.map(lambda body: json.dumps(body).encode())
    whole = json.dumps(example).encode()
    torn = st.integers(0, len(whole) - 1).map(lambda end: whole[:end])
    flipped = st.tuples(st.integers(0, len(whole) - 1), st.integers(128, 255)).map(
        lambda at: whole[: at[0]] + bytes([at[1]]) + whole[at[0] + 1 :]
    )
    deep = st.integers(1, 20000).map(lambda depth: b'{"prompts":' + b"[" * depth)
    return st.one_of(texts, texts, texts, texts, torn, flipped, st.binary(max_size=40), deep)


def requests(document: dict[str, Any]) -> st.SearchStrategy[tuple[str, str, bytes, str, bool]]:
    """Yields method, path, body, content type, and whether the document describes the request."""
    schema = document["components"]["schemas"]["Request"]
    operations = [
        (method.upper(), path, operation)
        for path, found in document["paths"].items()
        for method, operation in found.items()
    ]
    example = {"prompts": ["Hello world"], "tokens_to_generate": 1}
    generating = [(method, path) for method, path, one in operations if "requestBody" in one]
    known = {(method, path) for method, path, _ in operations}
    body = bodies(schema, example)
    described = st.builds(
        lambda place, body: (*place, body, "application/json", True),
        st.sampled_from(generating),
        body,
    )
    mistyped = st.builds(
        lambda place, kind: (*place, json.dumps(example).encode(), kind, True),
        st.sampled_from(generating),
        st.sampled_from(["", "text/plain", "application/jsonp", "multipart/form-data", "\xff"]),
    )
    methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NO"])
    letters = st.text("abc/._-%?&=\\~'\"<>;:@", max_size=12)
    paths = st.sampled_from([*document["paths"], "/page.js"]) | letters.map(lambda path: "/" + path)
    elsewhere = st.builds(
        lambda method, path, body: (method, path, body, "application/json", False),
        methods,
        paths,
        body,
    ).filter(lambda one: (one[0], plain(one[1])) not in known | {("GET", "/page.js")})
    kinds = st.sampled_from([described] * 6 + [mistyped, elsewhere, elsewhere])
    return kinds.flatmap(lambda kind: kind)  # one_of would merge equal strategies


def plain(path: str) -> str:
    """Returns a path as the server sees it: waitress merges leading slashes."""
    return "/" + path.partition("?")[0].lstrip("/")


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_malformed_requests_are_refused_and_the_server_continues(server, count: int) -> None:
    _, document = server.ask("GET", "/openapi.json")
    refusal = document["components"]["schemas"]["Refusal"]
    statuses: Counter[int] = Counter()
    connection: list[http.client.HTTPConnection] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(document))
    def refused(one: tuple[str, str, bytes, str, bool]) -> None:
        method, path, body, kind, described = one
        status, answer = send(connection, server, method, path, body, kind)
        assert 400 <= status < 500, (status, one)
        message = json.loads(answer)
        jsonschema.validate(message, refusal)
        assert message["message"]
        assert "\n" not in message["message"]
        if described:
            operation = document["paths"][path][method.lower()]
            assert str(status) in operation["responses"]
        else:
            assert status in (400, 404, 405), one
        statuses[status] += 1

    started = time.monotonic()
    refused()
    seconds = time.monotonic() - started
    print(f"{statuses.total()} requests in {seconds:.1f} s: {dict(statuses)}")
    assert statuses.total() >= count
    assert statuses[400] > count / 2  # described requests, and not only unknown paths
    assert statuses[404] and statuses[405] and statuses[415]
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    status, answer = server.ask("PUT", "/api", prompts=["Hello world"], tokens_to_generate=1)
    assert (status, len(answer["tokens"][0])) == (200, 12)
    assert server.process.poll() is None
    assert "Traceback" not in "".join(server.log)


def send(connection: list[Any], server, method, path, body, kind) -> tuple[int, bytes]:
    """Sends on the open connection, or on a new one if the server has closed it."""
    for _ in range(2):
        if not connection:
            connection.append(server.connect())
        try:
            connection[0].putrequest(method, path.encode("ascii", "replace").decode())
            connection[0].putheader("Content-Type", kind)
            connection[0].putheader("Content-Length", str(len(body)))
            connection[0].endheaders(body)
            answer = connection[0].getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            connection.pop().close()
    raise AssertionError(f"the server closed two connections without an answer: {method} {path!r}")
