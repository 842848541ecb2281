"""Connections, so that no client holds the server off the others.

By itself waitress stops to accept connections once 100 are open, keeps one that sends a byte every
two minutes, and reads a whole body before the application sees who sends it. Here

- a request has to arrive within ``ServerSettings.receive_seconds``, whatever its pace;
- when all places are taken, the connection that has waited longest for its client makes room, of
  the address that has the most of them; one whose request is being answered never does;
- the head of a request decides whether its body is read: sender, length and form;
- a connection that is closed before its body was read stays half open for a moment, because the
  client would lose the answer otherwise.
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
"""Length of a request line and headers; more gets status 431."""

LINGER_SECONDS = 2.0
"""How long what a refused client still sends is read and dropped."""

UNLIMITED = 1 << 31


def make_server(app: WSGIApplication, settings: ServerSettings, listener: socket.socket) -> Any:
    """Returns a waitress server on a listening socket; ``run()`` answers until it is closed."""
    adjustments: Any = Adjustments(
        sockets=[listener],
        threads=settings.threads,
        ident="megatron-infer",
        channel_request_lookahead=1,  # notices a client that hangs up while it waits
        max_request_header_size=MAX_HEAD_BYTES,
        max_request_body_size=settings.max_body_bytes + 1,  # the first length that is refused
        connection_limit=UNLIMITED,  # `_Server` has its own
        cleanup_interval=1,
        asyncore_use_poll=True,  # select() ends at file descriptor 1023
        clear_untrusted_proxy_headers=True,
    )
    adjustments.settings = settings
    where = (listener.family, listener.type, listener.proto, listener.getsockname())
    return _Server(app, {}, True, listener, adj=adjustments, sockinfo=where, bind_socket=False)


class _RefusalError(Error):
    """What waitress's error task answers in place of the application."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = status, HTTPStatus(status).phrase


class _Parser(HTTPRequestParser):
    """A request as it arrives; its head decides whether its body is read."""

    adj: Any
    path: str

    def parse_header(self, header_plus: bytes) -> None:
        """Parses the head; waitress does not expect all that Python refuses to convert."""
        try:
            super().parse_header(header_plus)
        except ValueError:  # more digits than Python reads, or an address with half its brackets
            raise ParsingError("the request line or its Content-Length is malformed") from None

    def received(self, data: bytes) -> int:
        """Takes some bytes; returns how many were this request's."""
        in_head = not self.headers_finished
        consumed: int = super().received(data)
        if in_head and self.headers_finished and self.body_rcv is not None and not self.error:
            self._check_sender()
        if self.error:
            self.expect_continue = False  # waitress would ask for the body and wait for it
        return consumed

    def _check_sender(self) -> None:
        """Refuses before the body; requests without one are left to the application."""
        host, sent = self.headers.get("HOST", ""), self.headers.get("AUTHORIZATION", "")
        path = "/" + self.path.lstrip("/")  # as the application sees it
        try:
            check_credentials(path, host, sent, self.adj.settings)
        except RequestError as error:
            self.error = _RefusalError(error.status, str(error))
            self.completed = True


class _ErrorTask(ErrorTask):
    """Answers in JSON what is refused before the application sees it."""

    channel: Any

    def execute(self) -> None:
        error: Any = getattr(self.request, "error")  # noqa: B009
        # 501 is for unknown transfer codings: the client's mistake like the others.
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

    adj: Any  # types-waitress says less than is there
    requests: Any
    requests_lock: threading.Lock
    server: Any
    socket: Any

    parser_class = _Parser
    error_task_class = _ErrorTask

    refused = False
    """Whether the last answer was given before the request was read to its end."""

    _begun = 0.0  # when the request that is not complete yet began to arrive
    _served = 0.0  # when the last answer was complete
    _in_service = 0  # threads in `service`: two for a moment between pipelined requests
    _linger_until = 0.0

    @property
    def lingers(self) -> bool:
        """Whether all that is left to do is to drop what the client still sends."""
        return bool(self._linger_until)

    @property
    def answering(self) -> bool:
        """Whether a request is being answered.

        A thread takes its request off `requests` before it sets `_served`, so `_in_service` is
        read after `requests`.
        """
        return bool(self.requests or self._in_service)

    @property
    def waiting_since(self) -> float:
        """When the wait for the client's next request, or the rest of it, began."""
        idle = max(self.creation_time, self._served)
        return float(idle if self.request is None else max(idle, self._begun))

    def received(self, data: bytes) -> bool:
        """Takes some bytes."""
        if self.request is None:
            self._begun = time.time()
        return bool(super().received(data))

    def service(self) -> None:
        """Answers one request; called in a thread of its own."""
        with self.requests_lock:
            self._in_service += 1
        try:
            super().service()
        finally:
            self._served = time.time()
            with self.requests_lock:
                self._in_service -= 1

    def check_time(self, now: float) -> None:
        """Gives up on a client that does not send its request, or takes its answer, in time."""
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
            request.completed = True
            self.requests.append(request)
            self.server.add_task(self)

    def drop(self) -> None:
        """Closes without a further word."""
        super().handle_close()

    def handle_close(self) -> None:
        """Closes, but first let a refused client finish sending, so that it sees the answer."""
        if self.refused and not self.lingers and self.connected:
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:  # it has gone
                self.drop()
                return
            self._linger_until = time.time() + LINGER_SECONDS
            return
        self.drop()

    def readable(self) -> bool:
        """Returns whether to wait for bytes of the client."""
        return self.socket is not None and bool(self.lingers or super().readable())

    def writable(self) -> bool:
        """Returns whether something is to be sent or closed."""
        return self.socket is not None and not self.lingers and bool(super().writable())

    def handle_read(self) -> None:
        """Reads, or drops what is sent after the answer."""
        if self.lingers:
            self.recv(self.adj.recv_bytes)
        else:
            super().handle_read()


class _Server(TcpWSGIServer):
    """Accepts connections, and closes those that keep others out."""

    active_channels: Any
    adj: Any

    channel_class = _Channel

    def readable(self) -> bool:
        """Makes room if there is none; whether to accept connections.

        Called before each wait for events: what is closed here is not waited for, and no new
        connection has its file descriptor yet.
        """
        super().readable()  # calls `maintenance` now and then
        if len(self.active_channels) >= self.adj.settings.connections:
            self._make_room()
        return self.accepting and len(self.active_channels) < self.adj.settings.connections

    def maintenance(self, now: float) -> None:
        """Gives up on clients that are late."""
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
