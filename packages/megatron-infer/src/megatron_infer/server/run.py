"""Running the application in waitress, and stopping it."""

import contextlib
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from flask import Flask
from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import ErrorTask

from megatron_infer.server.service import GenerationService
from megatron_infer.server.settings import ServerSettings

FLUSH_SECONDS = 2.0
LOOK_UP_SECONDS = 0.2
CUT_OFF = 2
"""A body this many times as long as allowed is not read to its end."""


def serve(
    app: Flask,
    service: GenerationService,
    settings: ServerSettings,
    taken: socket.socket,
    *,
    ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Answer requests until SIGTERM or Ctrl-C; to be called in the main thread.

    After SIGTERM new requests are refused, and accepted ones have ``settings.grace_seconds`` to
    finish. After Ctrl-C they end at once. Either way every client gets an answer.

    Args:
        app: of `create_app`.
        service: the app's.
        settings: the app's.
        taken: a listening socket, as `listen` returns.
        ready: called with the server's URL once it answers.

    Raises:
        KeyboardInterrupt: it was Ctrl-C.
    """
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server: Any = create_server(
        app,
        sockets=[taken],
        threads=settings.threads,
        ident="megatron-infer",
        # Text is sent as it comes, and a client that hangs up is noticed while it waits.
        send_bytes=1,
        channel_request_lookahead=1,
        # Flask refuses a body that is too long once it is read. One far too long is cut off here,
        # and a client that is still sending may not see why.
        max_request_body_size=CUT_OFF * settings.max_body_bytes,
        connection_limit=max(100, 2 * settings.threads),
        clear_untrusted_proxy_headers=True,
    )
    server.channel_class = _Channel
    received: SimpleQueue[int] = SimpleQueue()  # of what signals may interrupt, it alone may wait

    def stop(number: int, frame: FrameType | None) -> None:
        received.put(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    loop = threading.Thread(target=server.run, name="waitress", daemon=True)
    loop.start()
    try:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        ready(f"http://{host}:{taken.getsockname()[1]}")
        numbers = [_first(received)]
        while not received.empty():
            numbers.append(received.get())
        interrupted = signal.SIGINT in numbers
        service.close(0.0 if interrupted else settings.grace_seconds)
        _flush(server)
        _close(server)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        raise KeyboardInterrupt


def _first(received: "SimpleQueue[int]") -> int:
    """Wait for a signal.

    Of two that come together another thread may take both, and this one, which has to run their
    handlers, is not woken: so it looks up now and then.
    """
    while True:
        try:
            return received.get(timeout=LOOK_UP_SECONDS)
        except Empty:
            continue


def _flush(server: Any) -> None:
    """Wait until every response is on its way, a moment at most."""
    end = time.monotonic() + FLUSH_SECONDS
    while time.monotonic() < end:
        if not any(one.requests or one.total_outbufs_len for one in _channels(server)):
            return
        time.sleep(0.02)


def _close(server: Any) -> None:
    """Let the thread that waits for the server's sockets close them.

    Closed under its hands, they end it with a traceback.
    """
    closed = threading.Event()

    def close() -> None:
        server.close()
        closed.set()

    with contextlib.suppress(OSError):  # somebody else woke it, and it is closed
        server.trigger.pull_trigger(close)
    closed.wait(FLUSH_SECONDS)


def _channels(server: Any) -> list[Any]:
    return list(server.active_channels.values())


class _ErrorTask(ErrorTask):
    """Answers in JSON what waitress itself refuses, such as a malformed request line."""

    def execute(self) -> None:
        error: Any = getattr(self.request, "error")  # noqa: B009
        # 501 is for transfer codings that nobody knows: the client's mistake like the others.
        self.status = "400 Bad Request" if error.code == 501 else f"{error.code} {error.reason}"
        limits = self.channel.adj
        message = {
            413: f"the body is longer than {limits.max_request_body_size // CUT_OFF} bytes",
            431: f"the headers are longer than {limits.max_request_header_size} bytes",
        }.get(error.code) or " ".join(str(error.body).split())
        body = (json.dumps({"message": message}) + "\n").encode()
        self.response_headers = [*self.response_headers, ("Content-Type", "application/json")]
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):
    error_task_class = _ErrorTask
