"""Clients that leave while their request waits: real sockets, no model."""

from collections.abc import Callable
from typing import Any

from .test_server_connections import HEALTH, Running, read, wait_until


class Watched(Running):
    """A server that keeps what `make_server` tells the application about its client."""

    gone: Callable[[], bool] | None = None
    address = ""
    headers: frozenset[str] = frozenset()

    def answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        self.gone, self.address = environ["waitress.client_disconnected"], environ["REMOTE_ADDR"]
        self.headers = frozenset(name for name in environ if name.startswith("HTTP_"))
        return super().answer(environ, start)


def test_a_client_that_disconnects_while_its_request_waits_is_noticed() -> None:
    server = Watched()
    try:
        with server.connect() as client:
            client.sendall(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: server.gone is not None)
            gone = server.gone
            assert gone is not None and not gone()
        wait_until(gone)
    finally:
        server.end()


def test_the_address_of_a_client_is_not_taken_from_its_headers() -> None:
    server = Watched()
    try:
        head = HEALTH.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 10.0.0.9\r\n\r\n")
        with server.connect() as client:
            client.sendall(head)
            assert read(client)[0] == 200
        assert server.address == "127.0.0.1"
        assert server.headers == {"HTTP_HOST", "HTTP_CONNECTION"}
    finally:
        server.end()
