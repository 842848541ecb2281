"""The routes with a tiny model, without a socket."""

import dataclasses
import errno
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import torch
from flask.testing import FlaskClient
from megatron_data import ByteTokenizer
from megatron_infer import (
    GenerationService,
    SamplingParams,
    ServerSettings,
    create_app,
    generate,
)
from megatron_infer.server import app
from megatron_infer.server.address import _reason
from megatron_infer.server.app import PAGE
from megatron_infer.server.fields import GenerateRequest, RequestError
from megatron_infer.server.job import Job, TextDelta
from megatron_models import GPT

TOKEN = "correct-horse-battery-staple"
INFO = {
    "model": "run, iteration 3",
    "parameters": 5,
    "positions": 48,
    "vocabulary": 257,
    "device": "cpu",
    "dtype": "float32",
}


@pytest.fixture
def model(make_model: Callable[..., GPT]) -> GPT:
    return make_model(vocab_size=257)


@pytest.fixture
def make_client(model: GPT) -> Iterator[Callable[..., FlaskClient]]:
    services = []

    def make(**settings: Any) -> FlaskClient:
        service = GenerationService(
            model, ByteTokenizer(), max_tokens_per_request=settings.pop("max_tokens", 200)
        )
        services.append(service)
        return create_app(service, ServerSettings(**settings), INFO).test_client()

    yield make
    for service in services:
        service.close()


@pytest.fixture
def client(make_client: Callable[..., FlaskClient]) -> FlaskClient:
    return make_client()


def put(client: FlaskClient, **fields: Any) -> tuple[int, Any]:
    answer = client.put("/api", json=fields)
    assert answer.mimetype == "application/json"
    return answer.status_code, answer.get_json()


def test_an_answer_equals_generate_and_follows_the_document(
    client: FlaskClient, model: GPT
) -> None:
    prompts = ["Hello world", "Hi", "Hello world"]
    fields = {"tokens_to_generate": 7, "temperature": 0.8, "top_k": 30, "random_seed": 5}
    status, answer = put(client, prompts=prompts, **fields, logprobs=True)
    assert status == 200
    params = [
        SamplingParams(max_new_tokens=7, temperature=0.8, top_k=30, seed=5 + place)
        for place in range(3)
    ]
    expected = generate(model, ByteTokenizer(), prompts, params)
    assert answer["text"] == [one.prompt + one.text for one in expected]
    assert answer["tokens"] == [[*one.prompt.encode(), *one.tokens] for one in expected]
    assert answer["finish_reasons"] == [one.finish_reason for one in expected]
    assert answer["text"][0] != answer["text"][2]
    assert ["".join(one) for one in answer["segments"]] == answer["text"]
    for tokens, segments, scores in zip(
        answer["tokens"], answer["segments"], answer["logprobs"], strict=True
    ):
        assert len(tokens) == len(segments) == len(scores) + 1
        with torch.no_grad():
            logits = model.eval()(torch.tensor([tokens]))[:-1, 0, :257].log_softmax(-1)
        wanted = logits.gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)
        assert scores == pytest.approx(wanted.tolist(), abs=1e-9)
    check(client, "Answer", answer)


def test_defaults_equal_megatrons(client: FlaskClient) -> None:
    status, answer = put(client, prompts=["a"], tokens_to_generate=1)
    assert status == 200
    assert answer["logprobs"] is None
    assert "tokens_to_generate is 64" in put(client, prompts=["a"])[1]["message"]


def test_top_k_1_is_greedy_and_an_equal_seed_repeats(client: FlaskClient, model: GPT) -> None:
    _, answer = put(client, prompts=["The"], tokens_to_generate=9, top_k=1)
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    assert answer["text"] == ["The" + generate(model, ByteTokenizer(), ["The"], greedy)[0].text]
    drawn = [
        put(client, prompts=["The"], tokens_to_generate=9, random_seed=seed)[1]["tokens"]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_no_tokens_to_generate_scores_the_prompts(client: FlaskClient) -> None:
    status, answer = put(client, prompts=["x" * 48, "yz"], tokens_to_generate=0, logprobs=True)
    assert status == 200
    assert answer["text"] == ["x" * 48, "yz"]
    assert [len(scores) for scores in answer["logprobs"]] == [47, 1]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"prompts": ["x" * 45], "tokens_to_generate": 4}, "48 positions"),
        (
            {"prompts": ["x" * 30] * 7, "tokens_to_generate": 1},
            "217 tokens, but the limit of a request is 200",
        ),
        ({"prompts": ["x"], "tokens_to_generate": 1, "add_BOS": True}, "add_BOS"),
        ({"prompts": ["x"], "beam_width": 2}, "beam_width"),
        ({}, "prompts is missing"),
    ],
)
def test_requests_that_do_not_fit_are_refused_by_field(
    client: FlaskClient, fields: dict[str, Any], names: str
) -> None:
    status, answer = put(client, **fields)
    assert status == 400
    assert names in answer["message"]
    check(client, "Refusal", answer)


def test_bodies_that_are_too_long_or_not_json_are_refused(
    make_client: Callable[..., FlaskClient],
) -> None:
    client = make_client(max_body_bytes=100)
    assert put(client, prompts=["x" * 200])[0] == 413
    answer = client.put("/api", data='{"prompts": ["x"]}', content_type="text/plain")
    assert answer.status_code == 415


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api", 405), ("POST", "/api", 405), ("OPTIONS", "/api", 405), ("GET", "/no", 404)],
)
def test_other_methods_and_paths_are_answered_in_json(
    client: FlaskClient, method: str, path: str, status: int
) -> None:
    answer = client.open(path, method=method)
    assert answer.status_code == status
    assert list(answer.get_json()) == ["message"]
    assert (status == 405) == ("Allow" in answer.headers)


def test_a_stream_concatenates_to_the_answer(client: FlaskClient) -> None:
    fields = {"prompts": ["One", "Two"], "tokens_to_generate": 12, "random_seed": 9}
    answer = client.post("/api/stream", json=fields)
    assert answer.mimetype == "text/event-stream"
    events = parse_events(answer.get_data(as_text=True))
    assert events[0] == ("waiting", {"ahead": 0})
    assert events[-1] == ("done", put(client, **fields)[1])
    grown = ["One", "Two"]
    for name, data in events[1:-1]:
        assert name == "text"
        grown[data["index"]] += data["text"]
    assert grown == events[-1][1]["text"]


def test_a_failing_model_is_one_line_and_the_server_goes_on(
    client: FlaskClient, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", lambda *args, **settings: 1 / 0)
        status, answer = put(client, prompts=["x"], tokens_to_generate=1)
        assert (status, list(answer)) == (500, ["message"])
        assert "division" not in answer["message"]
        stream = client.post("/api/stream", json={"prompts": ["x"], "tokens_to_generate": 1})
        assert parse_events(stream.get_data(as_text=True))[-1] == ("failed", answer)
    with torch.no_grad():
        weight = next(model.parameters())
        kept = weight.clone()
        weight.fill_(float("nan"))
        status, answer = put(client, prompts=["x"], tokens_to_generate=1)
        assert status == 500
        assert "NaN" in answer["message"]
        weight.copy_(kept)
    assert put(client, prompts=["x"], tokens_to_generate=1)[0] == 200


def test_a_token_guards_everything_but_the_page_and_health(
    make_client: Callable[..., FlaskClient],
) -> None:
    client = make_client(token=TOKEN, host="0.0.0.0")
    paths = [rule.rule for rule in client.application.url_map.iter_rules()]
    assert len(paths) == len(set(paths)) == 8
    for path in [*paths, "/no"]:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            for method in ("GET", "PUT", "POST"):
                answer = client.open(path, method=method, headers=header)
                assert (answer.status_code == 401) == (path not in {*PAGE, "/health"})
    answer = client.get("/info")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    check_body = {"prompts": ["x"], "tokens_to_generate": 1}
    good = {"Authorization": f"Bearer {TOKEN}"}
    assert client.put("/api", json=check_body, headers=good).status_code == 200
    document = client.get("/openapi.json", headers=good).get_json()
    assert document["paths"]["/api"]["put"]["security"] == [{"token": []}]


def test_foreign_host_names_are_refused(client: FlaskClient) -> None:
    for host in ("localhost:5000", "127.0.0.1:5000", "localhost", "[::1]:5000"):
        assert client.get("/info", headers={"Host": host}).status_code == 200
    answer = client.get("/info", headers={"Host": "rebound.example"})
    assert answer.status_code == 403
    assert "Host" in answer.get_json()["message"]


def test_limits_and_address_are_the_documented_ones() -> None:
    settings = ServerSettings()
    assert dataclasses.asdict(settings) == {
        "host": "127.0.0.1",
        "port": 5000,
        "token": None,
        "grace_seconds": 10,
        "max_tokens_per_request": 12000,
        "max_body_bytes": 1048576,
        "max_running": 4,
        "max_waiting": 64,
        "receive_seconds": 30,
    }
    assert settings.only_this_machine


def test_unknown_address_errors_have_the_message_of_the_system() -> None:
    assert _reason(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert _reason(OSError("odd")) == "odd"
    assert _reason(OSError(errno.EADDRINUSE, "in use")).startswith("the port is in use; use")


def test_who_may_be_refused_by_name_is_documented(make_client: Callable[..., FlaskClient]) -> None:
    for token, documented in ((None, True), (TOKEN, False)):
        header = {"Authorization": f"Bearer {TOKEN}"}
        document = make_client(token=token).get("/openapi.json", headers=header).get_json()
        operations = [one for path in document["paths"].values() for one in path.values()]
        assert {"403" in one["responses"] for one in operations} == {documented}


def test_log_probabilities_are_documented_as_at_most_0(client: FlaskClient) -> None:
    answer = {"text": [""], "segments": [[]], "tokens": [[]], "finish_reasons": ["stop"]}
    check(client, "Answer", {**answer, "logprobs": [[-0.5, 0.0]]})
    with pytest.raises(jsonschema.ValidationError):
        check(client, "Answer", {**answer, "logprobs": [[0.5]]})


def test_a_request_may_have_as_many_tokens_as_are_allowed(
    make_client: Callable[..., FlaskClient],
) -> None:
    client = make_client(max_tokens=12)
    assert put(client, prompts=["ab", "abcd"], tokens_to_generate=2)[0] == 200
    status, answer = put(client, prompts=["ab", "abcde"], tokens_to_generate=2)
    assert status == 400
    assert "2 * (5 + 2) = 14 tokens, but the limit of a request is 12" in answer["message"]


def test_info_health_and_page_are_as_documented(client: FlaskClient) -> None:
    check(client, "Info", client.get("/info").get_json())
    check(client, "Health", client.get("/health").get_json())
    document = client.get("/openapi.json").get_json()
    for path, operations in document["paths"].items():
        if "get" in operations:
            answer = client.get(path)
            assert answer.status_code == 200
            content = operations["get"]["responses"]["200"]["content"]
            assert list(content) == [answer.mimetype]
    for path in PAGE:
        policy = client.get(path).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    routes = {rule.rule for rule in client.application.url_map.iter_rules()}
    assert routes - set(document["paths"]) == {"/page.js", "/page.css"}


def test_the_documents_example_works(client: FlaskClient) -> None:
    document = client.get("/openapi.json").get_json()
    body = document["paths"]["/api"]["put"]["requestBody"]["content"]["application/json"]
    assert put(client, **body["example"])[0] == 200
    # That of Megatron-LM's README.
    assert body["example"] == {"prompts": ["Hello world"], "tokens_to_generate": 1}


def test_similar_tokens_are_refused(make_client: Callable[..., FlaskClient]) -> None:
    client = make_client(token=TOKEN, host="0.0.0.0")
    good = f"Bearer {TOKEN}"
    assert client.get("/info", headers={"Authorization": good}).status_code == 200
    for sent in (f"{good}X", f"{good} X", good[:-1], f"{good}, {good}", good.upper(), TOKEN):
        assert client.get("/info", headers={"Authorization": sent}).status_code == 401
    twice = client.get("/info", headers=[("Authorization", good), ("Authorization", good)])
    assert twice.status_code == 401


def test_a_full_queue_sends_retry_after(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise RequestError(
            429, "68 requests are running or waiting, which is the limit; try again later"
        )

    monkeypatch.setattr(GenerationService, "submit", full)
    for answer in (
        client.put("/api", json={"prompts": ["x"]}),
        client.post("/api/stream", json={"prompts": ["x"]}),
    ):
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "5")
        assert "68 requests" in answer.get_json()["message"]
    assert "Retry-After" not in client.get("/no").headers


def test_addresses_are_separate_clients(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = []
    submit = GenerationService.submit

    def note(self: GenerationService, request: GenerateRequest, client: str) -> Job:
        clients.append(client)
        return submit(self, request, client)

    monkeypatch.setattr(GenerationService, "submit", note)
    body = {"prompts": ["x"], "tokens_to_generate": 1}
    for address in ("10.0.0.1", "2001:db8::1"):
        environ = {"REMOTE_ADDR": address}
        assert client.put("/api", json=body, environ_base=environ).status_code == 200
        answer = client.post("/api/stream", json=body, environ_base=environ)
        assert "event: done" in answer.get_data(as_text=True)
    assert clients == ["10.0.0.1", "10.0.0.1", "2001:db8::/64", "2001:db8::/64"]


def test_a_stopping_server_reports_it(model: GPT) -> None:
    service = GenerationService(model, ByteTokenizer())
    client = create_app(service, ServerSettings(), INFO).test_client()
    assert client.get("/health").status_code == 200
    service.close()
    answer = client.get("/health")
    assert (answer.status_code, answer.get_json()) == (503, {"status": "stopping"})
    assert put(client, prompts=["x"])[0] == 503
    assert client.get("/info").status_code == 200


def test_prompts_begin_with_the_tokenizers_token(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "bos_id", 7, raising=False)
    fields = {"prompts": ["", "ab"], "tokens_to_generate": 2, "top_k": 1}
    status, answer = put(client, **fields, add_BOS=True)
    assert status == 200
    assert [one[:-2] for one in answer["tokens"]] == [[7], [7, 97, 98]]
    assert put(client, **fields)[0] == 400
    fields["prompts"] = ["b"]
    assert put(client, **fields)[1]["tokens"][0][0] == 98


@pytest.mark.parametrize("name", ["eod_id", "eos_id"])
def test_a_document_that_ends_stops_its_prompt_alone(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fields = {"prompts": ["x", "yz"], "tokens_to_generate": 12, "top_k": 1, "logprobs": True}
    _, free = put(client, **fields)
    first, second = free["tokens"]
    end = next(token for token in first[1:] if token not in second[2:])
    length = 1 + first[1:].index(end)
    monkeypatch.setattr(ByteTokenizer, name, end, raising=False)
    _, stopped = put(client, **fields)
    assert stopped["tokens"] == [first[:length], second]
    assert stopped["finish_reasons"] == ["stop", "length"]
    assert stopped["logprobs"][0] == free["logprobs"][0][: length - 1]


def test_unseeded_requests_differ_and_a_tiny_top_p_is_greedy(
    client: FlaskClient,
) -> None:
    fields = {"prompts": ["The"], "tokens_to_generate": 30}
    one, two = (put(client, **fields)[1]["tokens"] for _ in range(2))
    assert one != two
    greedy = put(client, **fields, top_k=1)[1]["tokens"]
    assert put(client, **fields, top_p=1e-9)[1]["tokens"] == greedy
    assert put(client, **fields, temperature=1e-9)[1]["tokens"] == greedy
    assert (
        put(client, **fields, top_p=1.0, random_seed=4)[1]
        == put(client, **fields, random_seed=4)[1]
    )


def test_a_quiet_stream_is_kept_open_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(GenerateRequest(("x",)), "")
    monkeypatch.setattr(app, "QUIET_SECONDS", 0.0)
    stream = app.server_sent_events(job, lambda: False)
    assert next(stream).startswith("event: waiting")
    assert next(stream) == next(stream) == ": still here\n\n"
    monkeypatch.setattr(app, "QUIET_SECONDS", 1e9)
    job.put(TextDelta(0, "é"))
    assert next(stream) == 'event: text\ndata: {"index": 0, "text": "\\u00e9"}\n\n'
    job.put(RequestError(503, "the server stopped"))
    assert next(stream) == 'event: failed\ndata: {"message": "the server stopped"}\n\n'
    assert list(stream) == []
    assert job.cancelled


def check(client: FlaskClient, schema: str, value: Any) -> None:
    document = client.get("/openapi.json").get_json()
    jsonschema.validate(value, document["components"]["schemas"][schema])


def parse_events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
