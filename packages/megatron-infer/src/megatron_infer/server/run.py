"""Running the application in waitress until a signal stops it."""

import contextlib
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

from megatron_infer.server.connections import make_server
from megatron_infer.server.service import GenerationService
from megatron_infer.server.settings import ServerSettings

FLUSH_SECONDS = 2.0
LOOK_UP_SECONDS = 0.2


def serve(
    app: Flask,
    service: GenerationService,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Serves requests until SIGTERM or Ctrl-C. Call it in the main thread.

    After SIGTERM new requests are refused, and accepted ones have ``settings.grace_seconds`` to
    finish. After Ctrl-C they end at once. In both cases every client gets a response.

    Args:
        app: The application that `create_app` returned.
        service: The service of the application.
        settings: The settings of the application.
        listener: A listening socket, as `listen` returns it.
        on_ready: Called with the URL of the server once it accepts requests.

    Raises:
        KeyboardInterrupt: The server was stopped with Ctrl-C.
    """
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server = make_server(app, settings, listener)
    signals: SimpleQueue[int] = SimpleQueue()  # of what signals may interrupt, it alone may wait

    def stop(number: int, frame: FrameType | None) -> None:
        signals.put(number)

    previous_handlers = {
        number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    loop = threading.Thread(target=server.run, name="waitress", daemon=True)
    loop.start()
    try:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        on_ready(f"http://{host}:{listener.getsockname()[1]}")
        numbers = [_first(signals)]
        while not signals.empty():
            numbers.append(signals.get())
        interrupted = signal.SIGINT in numbers
        service.close(0.0 if interrupted else float(settings.grace_seconds))
        _flush(server)
        _close(server)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if interrupted:
        raise KeyboardInterrupt


def _first(signals: "SimpleQueue[int]") -> int:
    """Waits for a signal and returns its number.

    If two signals arrive together, another thread may receive both without waking this one, which
    has to run their handlers. The wait therefore polls.
    """
    while True:
        try:
            return signals.get(timeout=LOOK_UP_SECONDS)
        except Empty:
            continue


def _flush(server: Any) -> None:
    """Waits until all responses are sent, for at most ``FLUSH_SECONDS``."""
    end = time.monotonic() + FLUSH_SECONDS
    while time.monotonic() < end:
        if not any(channel.requests or channel.total_outbufs_len for channel in _channels(server)):
            return
        time.sleep(0.02)


def _close(server: Any) -> None:
    """Closes the server's sockets in the thread that waits for them.

    If another thread closed them, the waiting thread would end with a traceback.
    """
    closed = threading.Event()

    def close() -> None:
        server.close()
        closed.set()

    with contextlib.suppress(OSError):  # the thread was woken otherwise and has closed them
        server.trigger.pull_trigger(close)
    closed.wait(FLUSH_SECONDS)


def _channels(server: Any) -> list[Any]:
    return list(server.active_channels.values())
