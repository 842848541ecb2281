"""A running server as its clients see it: answers, errors and its end."""

import contextlib
import http.client
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from megatron_infer import SamplingParams, ServerSettings, generate, load_model
from megatron_models import parameter_count

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"

MEGATRONS_LINE = (
    "curl 'http://localhost:5000/api' -X 'PUT' -H 'Content-Type: application/json; charset=UTF-8' "
    """-d '{"prompts":["Hello world"], "tokens_to_generate":1}'"""
)

FOREVER = {"prompts": ["Once upon a time"] * 128, "tokens_to_generate": 4000}
"""Takes many minutes."""


def greedy(run_folder, prompts, tokens):
    loaded = load_model(run_folder)
    params = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    completions = generate(loaded.model, loaded.tokenizer, prompts, params)
    return [one.prompt + one.text for one in completions]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_curl_line_of_megatrons_readme_works(server) -> None:
    assert ServerSettings().port == 5000
    for line in (MEGATRONS_LINE, *curl_lines(DOCS.read_text())):
        words = shlex.split(line.replace(":5000/", f":{server.port}/"))
        done = subprocess.run([*words, "-sS"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if "/api/stream" in line:
            assert done.stdout.count("event: done") == 1
        else:
            answer = json.loads(done.stdout)
            assert answer["text"][0].startswith("Hello world")
            assert len(answer["tokens"][0]) == len("Hello world") + 1


def curl_lines(page: str) -> list[str]:
    """Returns every curl command line of a page with continuation lines joined."""
    joined = page.replace("\\\n", " ")
    found = [line[2:] for line in joined.splitlines() if line.startswith("$ curl ")]
    assert len(found) == 2
    return found


def test_parameters_are_counted_as_in_training(server, run_folder) -> None:
    config = load_model(run_folder).model.config
    assert config.padded_vocab_size > config.vocab_size
    status, info = server.ask("GET", "/info")
    assert (status, info["parameters"]) == (200, parameter_count(config))


def test_requests_at_the_same_time_get_their_own_answers(server, run_folder) -> None:
    prompts = [f"{name} said" for name in ("Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus", "Hal")]

    def ask(prompt: str) -> Any:
        fields = {"prompts": [prompt], "tokens_to_generate": 20, "top_k": 1}
        return server.ask("PUT", "/api", **fields)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts * 2))
    assert [status for status, _ in answers] == [200] * 16
    assert [answer["text"][0] for _, answer in answers] == greedy(run_folder, prompts, 20) * 2


def test_a_short_request_is_answered_beside_a_long_one(server) -> None:
    with contextlib.closing(accepted(server, FOREVER)) as long:
        fields = {"prompts": ["x"], "tokens_to_generate": 5}
        assert server.ask("PUT", "/api", **fields)[0] == 200
        assert long.readline().startswith(b"data: ")


def test_50_clients_at_once_are_all_answered(server) -> None:
    fields = {"prompts": ["x"], "tokens_to_generate": 5}
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: server.ask("PUT", "/api", **fields), range(50)))
    assert [status for status, _ in answers] == [200] * 50


@pytest.mark.parametrize("method", ["PUT /api", "POST /api/stream"])
def test_a_client_that_goes_away_stops_its_generation(server, method: str) -> None:
    body = json.dumps(FOREVER).encode()
    head = f"{method} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # the maximum number of concurrent requests of a client
            client = socket.create_connection((server.host, server.port))
            stack.enter_context(client).sendall(
                f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            )
        wait_for_requests(server, 3)
    status, _ = server.ask("PUT", "/api", prompts=["x"], tokens_to_generate=1)
    assert status == 200


def wait_for_requests(server, count: int) -> None:
    """Waits until the server has accepted this number of requests, of which the first three run."""
    end = time.monotonic() + 60
    ahead = -1
    while ahead < count:
        assert time.monotonic() < end, ahead
        with contextlib.closing(accepted(server, {"prompts": ["x"]})) as events:
            ahead = json.loads(events.readline().removeprefix(b"data: "))["ahead"]


@pytest.mark.parametrize(
    "words",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: -4\r\n\r\n",
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 300_000 + b"\r\n\r\n",
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000000\r\n\r\n",
        b"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n{",
        b"GET /%zz%00%ff HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    ],
)
def test_invalid_http_is_refused_or_dropped(server, words: bytes) -> None:
    with socket.create_connection((server.host, server.port), timeout=10) as client:
        with contextlib.suppress(OSError):  # refused before the client has sent everything
            client.sendall(words)
        client.settimeout(1)
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):  # the server waits for the rest
            while part := client.recv(4096):
                answer += part
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert 400 <= int(head.split()[1]) < 500, head
        assert list(json.loads(body)) == ["message"]
    assert server.ask("GET", "/health") == (200, {"status": "ok"})


def test_110_connections_of_one_byte_do_not_block_others(server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(110):
            client = socket.create_connection((server.host, server.port))
            stack.enter_context(client).sendall(b"G")
        connection = server.connect(timeout=20)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


def test_a_much_too_long_body_is_refused(server) -> None:
    connection = server.connect()
    with contextlib.suppress(ConnectionError):  # it may close before the client has sent everything
        connection.request("PUT", "/api", b"x" * (64 << 20), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413
    connection.close()
    assert server.ask("GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("length", [1 << 20, (1 << 20) + 1, (2 << 20) - 1])
def test_a_body_may_have_a_mebibyte(server, length: int) -> None:
    body = b'{"prompts": ["x"], "tokens_to_generate": 1}'.ljust(length)
    connection = server.connect()
    connection.request("PUT", "/api", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    if length == 1 << 20:
        assert answer.status == 200
    else:
        expected = {"message": "the body is longer than 1048576 bytes"}
        assert (answer.status, content) == (413, expected)


def test_sigterm_finishes_accepted_requests(start) -> None:
    server = start("--grace-seconds", "600")
    streams = [
        accepted(server, {"prompts": ["Slowly"], "tokens_to_generate": 600}) for _ in range(2)
    ]
    assert server.end(signal.SIGTERM) == 0
    for events in streams:
        _, answer = events.read().split(b"event: done\ndata: ")
        assert len(json.loads(answer)["tokens"][0]) == 606
    assert server.log[-1] == "megatron-infer: stopped\n"


def test_ctrl_c_ends_immediately_and_reports_it_to_every_client(start) -> None:
    server = start("--max-tokens-per-request", "600000", "--quiet")
    events = [accepted(server, FOREVER) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(server.ask, "PUT", "/api", prompts=["x"])
        wait_for_requests(server, 4)
        assert server.end(signal.SIGINT) == 130
        status, answer = pending.result()
    assert status == 503
    assert "stopped" in answer["message"]
    assert all(b"event: failed" in one.read() for one in events)
    assert server.log[1:] == ["megatron-infer: interrupted\n"]


def accepted(server, fields: dict[str, Any]) -> http.client.HTTPResponse:
    """Yields the events of a request after the server has accepted it."""
    stream = server.connect()
    headers = {"Content-Type": "application/json"}
    stream.request("POST", "/api/stream", json.dumps(fields), headers)
    events = stream.getresponse()
    assert events.readline() == b"event: waiting\n"
    return events


def test_a_second_server_on_the_port_gives_one_line(server, run_folder) -> None:
    program = Path(sys.executable).with_name("megatron-infer")
    done = subprocess.run(
        [program, "serve", "--load", run_folder, "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"megatron-infer: error: cannot listen on .*in use.*\n", done.stderr)


def test_the_log_has_no_prompt(start) -> None:
    server = start()
    assert server.ask("PUT", "/api", prompts=["a secret"], tokens_to_generate=2)[0] == 200
    assert server.ask("PUT", "/api", prompts=["a secret"], beam_width=2)[0] == 400
    assert server.end() == 0
    log = "".join(server.log)
    assert re.search(r"PUT /api 200, [\d.]+ s, 1 prompt\n", log)
    assert "PUT /api 400" in log
    assert "secret" not in log
