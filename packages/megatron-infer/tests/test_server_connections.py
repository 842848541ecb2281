"""Connections with slow, silent or refused clients: real sockets, no model."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from megatron_infer import ServerSettings, listen
from megatron_infer.server.connections import LINGER_SECONDS, make_server
from megatron_infer.server.guard import OPEN_PATHS

TOKEN = "correct-horse-battery-staple"
LIMIT = 4096
PATIENCE = 60  # seconds after which a wait is considered hung


class Running:
    """A server in a thread, whose application responds with the length of the body."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ServerSettings(
            port=0, max_body_bytes=LIMIT, receive_seconds=1000, **settings
        )
        self.listener = listen(self.settings)
        self.asked: list[str] = []
        self.hold = threading.Event()
        self.server = make_server(self.answer, self.settings, self.listener)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        self.asked.append(environ["PATH_INFO"])
        if environ["PATH_INFO"] == "/held":
            self.hold.wait(PATIENCE)
        body = environ["wsgi.input"].read()
        if environ["PATH_INFO"] == "/much":
            body = b"x" * (8 << 20)
        start("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=PATIENCE)

    def ask(self, *parts: bytes) -> tuple[int, bytes]:
        """Returns the status and the rest of the response to some bytes on a new connection."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            return read(client)

    def in_loop(self, call: Callable[[], object]) -> None:
        """Runs a function in the thread that waits for the sockets, after pending events."""
        done = threading.Event()
        with contextlib.suppress(OSError):  # the thread was awake and has closed its trigger
            self.server.trigger.pull_trigger(lambda: (call(), done.set()))
        assert done.wait(PATIENCE)

    def later(self, seconds: float) -> None:
        """Runs the periodic maintenance of the server as if the given time had passed."""
        self.in_loop(lambda: self.server.maintenance(time.time() + seconds))

    def channels(self) -> list[Any]:
        return list(self.server.active_channels.values())

    def end(self) -> None:
        self.hold.set()
        self.in_loop(self.server.close)
        self.thread.join(PATIENCE)
        self.server.task_dispatcher.shutdown()
        self.listener.close()


def read(client: socket.socket) -> tuple[int, bytes]:
    """Reads one response, up to its length or the end of the connection; status 0 if none."""
    answer = b""
    while part := client.recv(65536):
        answer += part
        head, end, body = answer.partition(b"\r\n\r\n")
        if end and b"Content-Length: %d\r\n" % len(body) in head + b"\r\n":
            break
    return (int(answer.split()[1]), answer) if answer else (0, b"")


def message(answer: bytes) -> str:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    body = json.loads(content)
    assert list(body) == ["message"]
    return str(body["message"])


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        client.settimeout(PATIENCE)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    server = Running()
    yield server
    server.end()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    server = Running(token=TOKEN)
    yield server
    server.end()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PUT = b"PUT /api HTTP/1.1\r\nHost: localhost\r\n"


def test_idle_connections_beyond_the_limit_do_not_block_others() -> None:
    server = Running(max_waiting=0)
    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        held = stack.enter_context(server.connect())
        held.sendall(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: "/held" in server.asked)
        places = server.settings.connections
        half_open = []
        for count in range(places + 44):
            half_open.append(stack.enter_context(server.connect()))
            half_open[-1].sendall(b"G")
            if count % 60 == 0:
                assert server.ask(HEALTH)[0] == 200
        assert server.ask(HEALTH)[0] == 200
        server.in_loop(lambda: None)
        assert len(server.channels()) < places
        states = [is_open(client) for client in half_open]
        assert states == sorted(states)  # the oldest connections were closed
        assert states.count(False) < 60
        server.hold.set()
        assert read(held)[0] == 200  # a connection whose request is being processed is kept


def test_the_address_with_the_most_connections_loses_one() -> None:
    server = Running(max_waiting=0)

    def attack() -> socket.socket:
        return socket.create_connection(
            server.listener.getsockname(), timeout=PATIENCE, source_address=("127.0.0.9", 0)
        )

    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        patient = stack.enter_context(server.connect())  # the oldest connection
        for _ in range(server.settings.connections + 10):
            stack.enter_context(attack()).sendall(b"G")
        assert server.ask(HEALTH)[0] == 200  # all earlier connections are accepted by now
        patient.sendall(HEALTH)
        assert read(patient)[0] == 200


def test_a_request_must_arrive_in_time_at_any_pace(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        silent, head, body, kept = (stack.enter_context(server.connect()) for _ in range(4))
        head.sendall(b"GET /health HT")
        body.sendall(PUT + b"Content-Length: 40\r\n\r\n{")
        kept.sendall(HEALTH.replace(b"close", b"keep-alive"))
        assert read(kept)[0] == 200
        wait_until(lambda: not any(one.answering for one in server.channels()))
        server.later(800)
        assert all(map(is_open, (silent, head, body, kept)))
        head.sendall(b"T")
        server.later(1001)
        for client in (head, body):
            status, answer = read(client)
            assert (status, message(answer)) == (408, "the request was not complete after 1000 s")
        assert read(silent) == read(kept) == (0, b"")


def test_the_time_limit_of_a_request_starts_with_its_first_byte(server: Running) -> None:
    with server.connect() as client:
        wait_until(lambda: len(server.channels()) == 1)
        (channel,) = server.channels()
        channel.creation_time -= 900
        client.sendall(HEALTH[:9])
        wait_until(lambda: channel.request is not None)
        server.later(800)
        client.sendall(HEALTH[9:].replace(b"close", b"keep-alive"))
        assert read(client)[0] == 200
        wait_until(lambda: channel.waiting_since > channel.creation_time + 900)
        server.later(800)
        assert is_open(client)


def test_a_pipelined_request_has_its_own_time_limit() -> None:
    server = Running()
    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        client = stack.enter_context(server.connect())
        client.sendall(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH[:9])
        wait_until(lambda: "/held" in server.asked)
        server.later(5000)
        server.hold.set()
        assert read(client)[0] == 200
        server.later(800)
        client.sendall(HEALTH[9:])
        assert read(client)[0] == 200


def test_a_client_that_does_not_read_its_response_is_disconnected(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")

        def unread() -> bool:
            return any(one.total_outbufs_len and not one.answering for one in server.channels())

        wait_until(unread)
        server.later(800)
        assert unread()
        server.later(1001)
        assert not unread()


def test_a_connection_with_an_unsent_response_is_kept(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        wait_until(lambda: not server.channels())  # log lines of other tests
        client = stack.enter_context(server.connect())
        client.sendall(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")

        def unread() -> list[Any]:
            found = [one for one in server.channels() if one.total_outbufs_len]
            return [one for one in found if not one.answering]

        wait_until(lambda: bool(unread()))
        (channel,) = unread()
        idle = stack.enter_context(server.connect())  # opened later
        wait_until(lambda: len(server.channels()) > 1)
        server.in_loop(server.server._make_room)
        assert read(idle) == (0, b"")
        server.in_loop(server.server._make_room)
        assert server.channels() == [channel]
        status, answer = read(client)
        assert (status, len(answer.partition(b"\r\n\r\n")[2])) == (200, 8 << 20)


def test_a_connection_is_not_idle_before_its_response_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Running()
    popped, go_on = threading.Event(), threading.Event()
    wake = server.server.pull_trigger

    def wake_and_wait() -> None:
        wake()
        if not channel.requests:  # waitress has removed the request
            popped.set()
            go_on.wait(PATIENCE)

    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        stack.callback(go_on.set)
        client = stack.enter_context(server.connect())
        wait_until(lambda: len(server.channels()) == 1)
        (channel,) = server.channels()
        channel.creation_time -= 5000  # as if the response had taken longer than receive_seconds
        monkeypatch.setattr(server.server, "pull_trigger", wake_and_wait)
        client.sendall(HEALTH.replace(b"close", b"keep-alive"))
        assert read(client)[0] == 200
        assert popped.wait(PATIENCE)
        wait_until(lambda: not channel.total_outbufs_len)
        channel._begun -= 5000
        server.in_loop(lambda: channel.check_time(time.time()))
        server.in_loop(server.server._make_room)
        assert not channel.will_close
        assert server.channels() == [channel]
        go_on.set()
        wait_until(lambda: not channel.answering)
        server.in_loop(lambda: channel.check_time(time.time()))
        client.sendall(HEALTH)
        assert read(client)[0] == 200


@pytest.mark.parametrize("length", [b"Content-Length: 4000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_the_token_is_checked_before_the_body_is_read(
    guarded: Running, length: bytes, expect: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatron_infer.server")
    before = len(guarded.asked)
    for header in (b"", b"Authorization: Bearer wrong\r\n"):
        status, answer = guarded.ask(PUT + header + expect + length + b"\r\n\r\n")
        assert (status, message(answer)) == (401, "send the header Authorization: Bearer TOKEN")
        assert b"www-authenticate: bearer\r\n" in answer.lower()
        assert b"100 Continue" not in answer
    assert len(guarded.asked) == before
    own = [one.getMessage() for one in caplog.records if one.name.startswith("megatron_infer")]
    assert own == ["127.0.0.1 refused unread, 401"] * 2
    good = b"Authorization: Bearer %s\r\n" % TOKEN.encode()
    with guarded.connect() as client:
        client.sendall(PUT + good + expect + b"Content-Length: 4\r\n\r\n")
        if expect:
            assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"body")
        status, answer = read(client)
        assert (status, answer[-4:]) == (200, b"body")
    for path in (*OPEN_PATHS, "/info"):  # the application checks requests without a body
        assert guarded.ask(HEALTH.replace(b"/health", path.encode()))[0] == 200


def test_a_foreign_host_name_is_refused_before_the_body_is_read(server: Running) -> None:
    head = b"PUT /api HTTP/1.1\r\nHost: rebound.example\r\nContent-Length: 40\r\n\r\n"
    status, answer = server.ask(head)
    assert status == 403
    assert "Host" in message(answer)


def test_a_too_long_body_is_refused_and_its_sender_reads_the_refusal(server: Running) -> None:
    fits = PUT + b"Content-Length: %d\r\n\r\n" % LIMIT
    status, answer = server.ask(fits, b"x" * LIMIT)
    assert (status, len(answer.partition(b"\r\n\r\n")[2])) == (200, LIMIT)
    longer = PUT + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1)
    expected = (413, f"the body is longer than {LIMIT} bytes")
    for body in (b"", b"x" * (LIMIT + 1)):
        status, answer = server.ask(longer, body)
        assert (status, message(answer)) == expected
    chunk = b"%x\r\n%s\r\n" % (LIMIT, b"x" * LIMIT)
    status, answer = server.ask(PUT + b"Transfer-Encoding: chunked\r\n\r\n", chunk * 20)
    assert (status, message(answer)) == expected


def test_data_of_a_refused_client_is_dropped_for_a_moment(server: Running) -> None:
    with server.connect() as client:
        client.sendall(PUT + b"Content-Length: 9999\r\n\r\n")
        assert read(client)[0] == 413
        before = len(server.asked)
        wait_until(lambda: all(one.lingers for one in server.channels()))
        client.sendall(HEALTH * 20)
        server.in_loop(lambda: None)
        assert len(server.asked) == before
        server.later(0)
        assert len(server.channels()) == 1
        server.later(LINGER_SECONDS + 0.1)
        assert not server.channels()


def test_a_refused_client_that_closes_its_connection_is_not_waited_for(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_infer.server.connections.LINGER_SECONDS", 1000.0)
    with server.connect() as client:
        client.sendall(PUT + b"Content-Length: 9999\r\n\r\n")
        assert read(client)[0] == 413
        wait_until(lambda: [one.lingers for one in server.channels()] == [True])
    wait_until(lambda: not server.channels())


def test_late_clients_are_looked_for_again_and_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(server.server, "maintenance", lambda now: done.set())
    server.in_loop(lambda: setattr(server.server, "next_channel_cleanup", 0.0))
    assert done.wait(PATIENCE)


LENGTHS = [b"-1", b"+1", b"1_0", b"0x1", b"1.0", b"1e3", b"\xb2", b"", b"5, 5", b"nan", b"inf"]


@pytest.mark.parametrize("length", LENGTHS)
def test_an_invalid_content_length_is_one_line(server: Running, length: bytes) -> None:
    status, answer = server.ask(PUT + b"Content-Length: " + length + b"\r\n\r\n")
    assert status == 400
    assert "Content-Length" in message(answer)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns warnings and errors, but not of waitress's queue, which depend on the load."""
    return [
        one.getMessage()
        for one in caplog.records
        if one.levelno >= logging.WARNING and one.name != "waitress.queue"
    ]


@pytest.mark.parametrize("digits", [10, 20, 308, 309, 4300, 4301, 20_000])
def test_a_content_length_of_many_digits_is_one_line(
    server: Running, digits: int, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = server.ask(PUT + b"Content-Length: " + b"9" * digits + b"\r\n\r\n")
    assert status in (400, 413)
    assert len(message(answer)) < 100
    assert warnings_in(caplog) == []


HEADS = [
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET //[ HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET http://localhost:" + b"9" * 5000 + b"/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /health?n=" + b"9" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nRange: bytes=" + b"9" * 5000 + b"-\r\n\r\n",
    PUT + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 3000 + b"\r\n" + b"x" * 2000,
    PUT + b"Transfer-Encoding: chunked\r\n\r\n" + b"9" * 5000,
    PUT + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    b"X" * 5000 + b"\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS)
def test_heads_that_python_cannot_parse_cause_no_traceback(
    server: Running, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    status, answer = server.ask(head)
    if status != 200:
        assert status in (400, 413)
        assert len(message(answer)) < 100
    assert warnings_in(caplog) == []


def test_long_heads_are_refused(server: Running) -> None:
    for length, expected in ((32 * 1024 - 200, 200), (32 * 1024, 431)):
        status, answer = server.ask(HEALTH[:-2] + b"X: " + b"x" * length + b"\r\n\r\n")
        assert status == expected
        if expected == 431:
            assert message(answer) == "the headers are longer than 32768 bytes"


def test_a_connection_whose_request_was_served_is_closed_without_delay(server: Running) -> None:
    wait_until(lambda: not server.channels())
    client = server.connect()
    client.sendall(HEALTH.replace(b"close", b"keep-alive"))
    assert read(client)[0] == 200
    (channel,) = server.channels()
    client.close()
    wait_until(lambda: not channel.connected)
    assert not channel.lingers
