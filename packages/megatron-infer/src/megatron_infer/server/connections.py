"""Connection handling that protects other clients from slow or numerous connections.

By default, waitress stops accepting connections when 100 are open, keeps a connection open that
sends a byte every two minutes, and reads a whole body before the application sees the sender. This
module changes the following:

- A request must arrive within ``ServerSettings.receive_seconds``.
- When the connection limit is reached, the server closes the connection that has waited longest for
  its client, among those of the address with the most connections. Connections whose request is
  being processed are never closed.
- The head of a request determines whether its body is read: sender, length and form.
- A connection that is closed before its body was read stays half open for a moment, because
  otherwise the client would lose the response.
"""

import json
import logging
import socket
import threading
import time
from collections import Counter
from http import HTTPStatus
from typing import Any
from wsgiref.types import WSGIApplication

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask
from waitress.utilities import Error

from megatron_infer.server.fields import RequestError
from megatron_infer.server.guard import check_credentials
from megatron_infer.server.settings import ServerSettings

log = logging.getLogger("megatron_infer.server")

MAX_HEAD_BYTES = 32 << 10
"""The largest size of a request line with headers; larger ones get status 431."""

LINGER_SECONDS = 2.0
"""Seconds for which data of a refused client is read and dropped."""

UNLIMITED = 1 << 31


def make_server(app: WSGIApplication, settings: ServerSettings, listener: socket.socket) -> Any:
    """Returns a waitress server on a listening socket. Its ``run()`` serves until it is closed."""
    adjustments: Any = Adjustments(
        sockets=[listener],
        threads=settings.threads,
        ident="megatron-infer",
        channel_request_lookahead=1,  # detects a client that disconnects while it waits
        max_request_header_size=MAX_HEAD_BYTES,
        max_request_body_size=settings.max_body_bytes + 1,  # the smallest size that is refused
        connection_limit=UNLIMITED,  # `_Server` has its own limit
        cleanup_interval=1,
        asyncore_use_poll=True,  # select() is limited to file descriptor 1023
        clear_untrusted_proxy_headers=True,
    )
    adjustments.settings = settings
    where = (listener.family, listener.type, listener.proto, listener.getsockname())
    return _Server(app, {}, True, listener, adj=adjustments, sockinfo=where, bind_socket=False)


class _RefusalError(Error):
    """The error that the error task of waitress reports instead of the application."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = status, HTTPStatus(status).phrase


class _Parser(HTTPRequestParser):
    """A request parser that decides after the head whether the body is read."""

    adj: Any
    path: str

    def parse_header(self, header_plus: bytes) -> None:
        """Parses the head. Converts the ValueErrors of Python that waitress does not handle."""
        try:
            super().parse_header(header_plus)
        except ValueError:  # too many digits for Python, or an address with an unbalanced bracket
            raise ParsingError("the request line or its Content-Length is malformed") from None

    def received(self, data: bytes) -> int:
        """Processes received bytes and returns how many belong to this request."""
        in_head = not self.headers_finished
        consumed: int = super().received(data)
        if in_head and self.headers_finished and self.body_rcv is not None and not self.error:
            self._check_sender()
        if self.error:
            self.expect_continue = (
                False  # otherwise waitress would request the body and wait for it
            )
        return consumed

    def _check_sender(self) -> None:
        """Checks the sender before the body is read.

        The application checks the sender of requests without a body.
        """
        host, sent = self.headers.get("HOST", ""), self.headers.get("AUTHORIZATION", "")
        path = "/" + self.path.lstrip("/")  # as the application sees it
        try:
            check_credentials(path, host, sent, self.adj.settings)
        except RequestError as error:
            self.error = _RefusalError(error.status, str(error))
            self.completed = True


class _ErrorTask(ErrorTask):
    """Reports an error as JSON for a request that is refused before the application sees it."""

    channel: Any

    def execute(self) -> None:
        error: Any = getattr(self.request, "error")  # noqa: B009
        # waitress uses 501 for unknown transfer codings, which are an error of the client.
        status, reason = (400, "Bad Request") if error.code == 501 else (error.code, error.reason)
        settings: ServerSettings = self.channel.adj.settings
        message = {
            413: f"the body is longer than {settings.max_body_bytes} bytes",
            431: f"the headers are longer than {MAX_HEAD_BYTES} bytes",
        }.get(status) or " ".join(str(error.body).split())
        body = (json.dumps({"message": message}) + "\n").encode()
        self.status = f"{status} {reason}"
        self.response_headers = [*self.response_headers, ("Content-Type", "application/json")]
        if status == 401:
            self.response_headers.append(("WWW-Authenticate", "Bearer"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.channel.refused = True
        log.info("%s refused unread, %d", self.channel.addr[0], status)
        self.write(body)


class _Channel(HTTPChannel):
    """One connection. Times are those of ``time.time()``, as everywhere in waitress."""

    adj: Any  # types-waitress is incomplete
    requests: Any
    requests_lock: threading.Lock
    server: Any
    socket: Any

    parser_class = _Parser
    error_task_class = _ErrorTask

    refused = False
    """Whether the last response was sent before the request was read completely."""

    _begun = 0.0  # when the incomplete request started to arrive
    _served = 0.0  # when the last response was complete
    _in_service = 0  # threads in `service`; briefly two between pipelined requests
    _linger_until = 0.0

    @property
    def lingers(self) -> bool:
        """Whether the channel only drops data that the client still sends."""
        return bool(self._linger_until)

    @property
    def answering(self) -> bool:
        """Whether a request is being processed.

        A thread removes its request from `requests` before it sets `_served`, so `_in_service` is
        read after `requests`.
        """
        return bool(self.requests or self._in_service)

    @property
    def waiting_since(self) -> float:
        """The start of the wait for the next request of the client, or for the rest of it."""
        idle = max(self.creation_time, self._served)
        return float(idle if self.request is None else max(idle, self._begun))

    def received(self, data: bytes) -> bool:
        """Processes received bytes."""
        if self.request is None:
            self._begun = time.time()
        return bool(super().received(data))

    def service(self) -> None:
        """Processes one request, in a separate thread."""
        with self.requests_lock:
            self._in_service += 1
        try:
            super().service()
        finally:
            self._served = time.time()
            with self.requests_lock:
                self._in_service -= 1

    def check_time(self, now: float) -> None:
        """Closes the connection if the client is late to send a request or read a response."""
        latest = now - self.adj.settings.receive_seconds
        if self.lingers:
            if now > self._linger_until:
                self.drop()
        elif self.answering:
            return
        elif self.total_outbufs_len:
            if self.last_activity < latest:
                self.drop()
        elif self.waiting_since < latest:
            self._refuse_late()

    def _refuse_late(self) -> None:
        with self.requests_lock:
            request, self.request = self.request, None
            if request is None:
                self.will_close = True
                return
            seconds = self.adj.settings.receive_seconds
            request.error = _RefusalError(408, f"the request was not complete after {seconds} s")
            self.requests.append(request)
            self.server.add_task(self)

    def drop(self) -> None:
        """Closes the connection without a response."""
        super().handle_close()

    def handle_close(self) -> None:
        """Closes the connection.

        A refused client may first finish sending, so that it reads the response.
        """
        if self.refused and not self.lingers and self.connected:
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:  # the client has disconnected
                self.drop()
                return
            self._linger_until = time.time() + LINGER_SECONDS
            return
        self.drop()

    def readable(self) -> bool:
        """Returns whether to wait for data from the client."""
        return self.socket is not None and bool(self.lingers or super().readable())

    def writable(self) -> bool:
        """Returns whether there is data to send or a connection to close."""
        return self.socket is not None and not self.lingers and bool(super().writable())

    def handle_read(self) -> None:
        """Reads data, or drops data that is sent after the response."""
        if self.lingers:
            self.recv(self.adj.recv_bytes)
        else:
            super().handle_read()


class _Server(TcpWSGIServer):
    """A server that closes idle connections when the connection limit is reached."""

    active_channels: Any
    adj: Any

    channel_class = _Channel

    def readable(self) -> bool:
        """Closes a connection if the limit is reached, and returns whether to accept connections.

        Called before each wait for events, so that closed connections are not waited for and no new
        connection has reused their file descriptor.
        """
        super().readable()  # calls `maintenance` periodically
        if len(self.active_channels) >= self.adj.settings.connections:
            self._make_room()
        return self.accepting and len(self.active_channels) < self.adj.settings.connections

    def maintenance(self, now: float) -> None:
        """Closes the connections of late clients."""
        for channel in list(self.active_channels.values()):
            channel.check_time(now)

    def _make_room(self) -> None:
        waiting = [
            one
            for one in self.active_channels.values()
            if not one.answering and (one.lingers or not one.total_outbufs_len)
        ]
        if waiting:
            held = Counter(one.addr[0] for one in waiting)
            min(waiting, key=lambda one: (-held[one.addr[0]], one.waiting_since)).drop()
