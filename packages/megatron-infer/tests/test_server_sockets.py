"""What a server waits for on its sockets, and which connections it ends: no model."""

import contextlib
import fcntl
import resource
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_infer import ServerSettings, listen
from megatron_infer.server.connections import _Server

from . import test_server_connections
from .test_server_connections import HEALTH, PUT, Running, read, wait_until

HELD = b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def server() -> Iterator[Running]:
    server = Running(max_waiting=0)
    yield server
    server.end()


def in_loop(server: Running, call: Callable[[], Any]) -> Any:
    """Returns the result of a function that the thread of the sockets calls."""
    found: list[Any] = []
    server.in_loop(lambda: found.append(call()))
    return found[0]


def only_channel(server: Running) -> Any:
    wait_until(lambda: len(server.channels()) == 1)
    return server.channels()[0]


def test_a_connection_is_read_and_written_as_its_state_allows(server: Running) -> None:
    with server.connect():
        channel = only_channel(server)

        def states() -> list[tuple[bool, bool]]:
            found = []

            def note() -> None:
                found.append((channel.readable(), channel.writable()))

            note()  # idle
            channel.requests = [object()]
            note()  # a client that leaves while its request is processed is noticed
            channel.requests = [object(), object()]
            note()  # no more requests are read
            channel.requests = []
            channel.total_outbufs_len = 9
            note()  # a response is not sent
            channel._linger_until = 1e12
            note()  # a refused client may send the rest
            channel._linger_until, channel.total_outbufs_len = 0.0, 0
            channel.drop()
            note()  # closed
            channel.will_close = True
            note()
            return found

        assert in_loop(server, states) == [
            (True, False),
            (True, False),
            (False, False),
            (False, True),
            (True, False),
            (False, False),
            (False, False),
        ]


def test_no_connection_is_accepted_beyond_those_that_are_busy(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(2)]
        for client in busy:
            client.sendall(HELD)
        wait_until(lambda: len(server.asked) == 2)
        for limit, accepts in ((3, True), (2, False)):
            monkeypatch.setattr(ServerSettings, "connections", limit)
            assert in_loop(server, server.server.readable) is accepts
        server.hold.set()
        assert [read(client)[0] for client in busy] == [200, 200]


def test_a_refused_client_reads_the_end_of_its_answer_at_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_infer.server.connections.LINGER_SECONDS", 1000.0)
    with server.connect() as client:
        client.sendall(PUT + b"Content-Length: 9999\r\n\r\n")
        assert read(client)[0] == 413
        assert client.recv(1) == b""
        channel = only_channel(server)
        wait_until(lambda: channel.lingers)


def test_a_refused_client_that_has_left_is_not_waited_for(server: Running) -> None:
    def fail(how: int) -> None:
        raise OSError

    with server.connect():
        channel = only_channel(server)

        def close() -> tuple[bool, bool]:
            channel.refused = True
            channel.socket = SimpleNamespace(shutdown=fail, close=channel.socket.close)
            channel.handle_close()
            return channel.lingers, channel.connected

        assert in_loop(server, close) == (False, False)
        assert server.channels() == []


def test_file_descriptors_may_have_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """``select()`` would take those up to 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 2000:
        if hard != resource.RLIM_INFINITY and hard < 2000:
            pytest.skip("this process may not open 2000 files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))

    def listen_high(settings: ServerSettings) -> socket.socket:
        with listen(settings) as low:
            return socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500))

    monkeypatch.setattr(test_server_connections, "listen", listen_high)
    server = Running(max_waiting=0)
    try:
        assert server.listener.fileno() >= 1500
        assert server.ask(HEALTH)[0] == 200
    finally:
        server.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("states", "dropped"),
    [  # answering, lingers, bytes to send, address, start of the wait
        ([(True, False, 0, "a", 1), (False, False, 9, "a", 2)], None),
        ([(False, True, 9, "a", 2), (False, False, 9, "a", 1)], 0),  # it only drops data
        ([(False, False, 0, "a", 2), (False, False, 0, "a", 1)], 1),
        ([(False, False, 0, "a", 1), (False, False, 0, "b", 3), (False, False, 0, "b", 2)], 2),
        ([(False, False, 0, "a", 1), (True, False, 0, "b", 2), (False, False, 0, "b", 3)], 0),
    ],
)
def test_room_is_made_by_the_oldest_that_waits_at_the_address_with_the_most(
    states: list[tuple[bool, bool, int, str, int]], dropped: int | None
) -> None:
    ended: list[int] = []
    channels = {
        number: SimpleNamespace(
            answering=answering,
            lingers=lingers,
            total_outbufs_len=unsent,
            addr=(address, 80),
            waiting_since=start,
            drop=lambda number=number: ended.append(number),
        )
        for number, (answering, lingers, unsent, address, start) in enumerate(states)
    }
    server: Any = SimpleNamespace(active_channels=channels)
    _Server._make_room(server)
    assert ended == ([] if dropped is None else [dropped])
