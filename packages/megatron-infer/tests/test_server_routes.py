"""What the routes answer beside a continuation: texts of errors, headers, log lines, documents."""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import torch
from flask import abort
from flask.testing import FlaskClient
from megatron_data import ByteTokenizer
from megatron_infer import GenerationService, InferError, ServerSettings, create_app
from megatron_infer.server import app
from megatron_infer.server.fields import GenerateRequest
from megatron_infer.server.job import Job, TextDelta
from megatron_infer.server.openapi import openapi_document
from megatron_models import GPT

LOG = "megatron_infer.server"


@pytest.fixture(scope="module")
def service(make_model: Callable[..., GPT]) -> Iterator[GenerationService]:
    service = GenerationService(make_model(vocab_size=257), ByteTokenizer())
    yield service
    service.close()


@pytest.fixture
def client(service: GenerationService) -> FlaskClient:
    return create_app(service, ServerSettings(max_body_bytes=4096)).test_client()


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/no", 404, "this path does not exist; GET /openapi.json lists all paths"),
        ("GET", "/api", 405, "GET is not allowed here; allowed: PUT"),
        ("PUT", "/api/stream", 405, "PUT is not allowed here; allowed: POST"),
        ("POST", "/health", 405, "POST is not allowed here; allowed: GET, HEAD"),
    ],
)
def test_errors_of_paths_and_methods_say_what_to_use(
    client: FlaskClient, method: str, path: str, status: int, message: str
) -> None:
    answer = client.open(path, method=method)
    assert (answer.status_code, answer.get_json()) == (status, {"message": message})
    allowed = message.partition("allowed: ")[2]
    assert answer.headers.get("Allow", "") == allowed


def test_a_body_that_is_too_long_is_refused_with_the_limit(client: FlaskClient) -> None:
    answer = client.put("/api", json={"prompts": ["x" * 4096]})
    assert answer.status_code == 413
    assert answer.get_json() == {"message": "the body is longer than 4096 bytes"}


def test_other_errors_of_http_are_explained_on_one_line(client: FlaskClient) -> None:
    client.application.add_url_rule("/tea", view_func=lambda: abort(418, "no\n  coffee"))
    answer = client.get("/tea")
    assert (answer.status_code, answer.get_json()) == (418, {"message": "no coffee"})
    assert "WWW-Authenticate" not in answer.headers


def test_an_error_of_the_program_is_logged_and_its_text_is_not_sent(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GenerationService, "submit", lambda *_: {}["secret"])
    answer = client.put("/api", json={"prompts": ["x"]})
    expected = {"message": "internal error; see the log of the server"}
    assert (answer.status_code, answer.get_json()) == (500, expected)
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_a_failed_generation_is_logged_with_its_cause(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> list[str]:
        def forward(*arguments: object, **settings: object) -> None:
            raise error

        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(GPT, "forward", forward)
            body = {"prompts": ["x"], "tokens_to_generate": 1}
            assert client.put("/api", json=body).status_code in (500, 503)
        return [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]

    assert fail(ZeroDivisionError()) == ["a generation failed"]
    assert caplog.records[0].exc_info is not None
    assert fail(torch.OutOfMemoryError()) == ["a generation ran out of memory"]
    assert fail(InferError("no state")) == ["a generation failed: no state"]


def test_each_request_is_one_line_of_the_log(
    client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    for prompts in (["a"], ["a", "b"]):
        client.put("/api", json={"prompts": prompts, "tokens_to_generate": 1})
    client.get("/n\u00f6")
    lines = [one.getMessage() for one in caplog.records if one.name == LOG]
    seconds = r"[0-9]\.[0-9]{2} s"
    for line, expected in zip(
        lines,
        (f"PUT /api 200, {seconds}, 1 prompt", f"PUT /api 200, {seconds}, 2 prompts",
         rf"GET /n\\xf6 404, {seconds}"),
        strict=True,
    ):  # fmt: skip
        assert re.fullmatch(expected, line), line


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")],
)
def test_files_of_the_page_have_the_types_that_browsers_require(
    client: FlaskClient, path: str, kind: str
) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.mimetype) == (200, kind)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert len(answer.get_data()) > 100


def test_a_client_that_has_gone_gets_no_answer(client: FlaskClient) -> None:
    gone = {"waitress.client_disconnected": lambda: True}
    body = {"prompts": ["x"], "tokens_to_generate": 1}
    assert client.put("/api", json=body, environ_base=gone).status_code == 503
    stream = client.post("/api/stream", json=body, environ_base=gone)
    assert stream.get_data(as_text=True).count("event: ") == 1  # waiting, and nothing after it


def test_information_is_an_empty_object_unless_given(client: FlaskClient) -> None:
    assert client.get("/info").get_json() == {}


def test_a_stream_is_not_interrupted_by_comments_within_seconds() -> None:
    job = Job(GenerateRequest(("x",)), "")
    waited: list[object] = []

    def is_gone() -> bool:  # asked before each wait for an event
        waited.append(None)
        if len(waited) == 2:
            job.put(TextDelta(0, "a"))
        return False

    stream = app.server_sent_events(job, is_gone)
    assert next(stream) == 'event: waiting\ndata: {"ahead": 0}\n\n'
    assert next(stream).startswith("event: text")  # no comment in the first wait
    stream.close()


def test_every_text_is_joined_by_its_segments_to_the_last_byte(client: FlaskClient) -> None:
    """A random model ends many continuations within a character, which becomes U+FFFD."""
    prompts = [chr(97 + number) for number in range(24)]
    fields = {"tokens_to_generate": 3, "top_k": 1, "logprobs": True}
    answer = client.put("/api", json={"prompts": prompts, **fields}).get_json()
    texts = answer["text"]
    assert texts == [ByteTokenizer().decode(tokens) for tokens in answer["tokens"]]
    assert ["".join(segments) for segments in answer["segments"]] == texts
    assert {len(segments) for segments in answer["segments"]} == {4}
    incomplete = [
        segments[-1]
        for tokens, segments in zip(answer["tokens"], answer["segments"], strict=True)
        if 0xC2 <= tokens[-1] <= 0xF4
    ]
    assert incomplete and all(last.endswith("\ufffd") for last in incomplete)


def test_scored_prompts_are_returned_as_they_are(client: FlaskClient) -> None:
    body = {"prompts": ["ab", "c"], "tokens_to_generate": 0, "logprobs": True}
    answer = client.put("/api", json=body).get_json()
    assert answer["text"] == ["ab", "c"]
    assert answer["tokens"] == [[97, 98], [99]]
    assert answer["segments"] == [["a", "b"], ["c"]]
    assert answer["finish_reasons"] == ["length", "length"]


@pytest.mark.parametrize(
    ("start", "edges", "added"),
    [(7, [7], True), (7, [7, 9], True), (7, [9], False), (7, [], False), (None, [], False)],
)
def test_prompts_start_as_the_tokenizer_starts_its_texts(
    service: GenerationService,
    monkeypatch: pytest.MonkeyPatch,
    start: int | None,
    edges: list[int],
    added: bool,
) -> None:
    monkeypatch.setattr(ByteTokenizer, "bos_id", start, raising=False)
    monkeypatch.setattr(ByteTokenizer, "encode_batch", lambda _, texts: [edges for _ in texts])
    assert service.request_defaults == ({"add_BOS": True} if added else {})


# -- the document -----------------------------------------------------------------------------


GOOD: dict[str, Any] = {
    "Request": {"prompts": ["a"]},
    "Answer": {"text": [], "segments": [], "tokens": [], "logprobs": None, "finish_reasons": []},
    "Info": {"model": "m", "parameters": 1, "positions": 1, "vocabulary": 1, "device": "cpu",
             "dtype": "float32"},
    "Health": {"status": "ok"},
    "Refusal": {"message": "no"},
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_schemas_allow_the_documented_fields_and_no_others(name: str) -> None:
    schemas = openapi_document(48, needs_token=False)["components"]["schemas"]
    assert sorted(schemas) == sorted(GOOD)
    schema = jsonschema.Draft202012Validator(schemas[name])
    assert schema.is_valid(GOOD[name])
    assert not schema.is_valid(GOOD[name] | {"temprature": 1})
    required = schemas[name]["required"]
    assert required == (list(GOOD[name]) if name != "Request" else ["prompts"])
    for field in required:
        assert not schema.is_valid({key: GOOD[name][key] for key in GOOD[name] if key != field})


def test_the_document_says_which_operations_need_a_body_and_a_token() -> None:
    for needs_token in (True, False):
        document = openapi_document(48, needs_token=needs_token)
        guarded = set()
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if "401" in operation["responses"]:
                    guarded.add(path)
                assert ("401" in operation["responses"]) == ("security" in operation)
                assert operation.get("requestBody", {}).get("required", False) == (
                    path in ("/api", "/api/stream")
                )
        assert guarded == (
            {"/api", "/api/stream", "/info", "/openapi.json"} if needs_token else set()
        )
        assert ("securitySchemes" in document["components"]) == needs_token


def test_health_is_documented_with_both_states() -> None:
    health = openapi_document(48, needs_token=True)["paths"]["/health"]["get"]["responses"]
    assert sorted(health) == ["200", "503"]


def test_a_refusal_of_a_stream_has_its_status(client: FlaskClient) -> None:
    answer = client.post("/api/stream", json={"prompts": []})
    assert answer.status_code == 400
    assert "1 to 128 texts" in answer.get_json()["message"]
