"""Stopping a server: signals that another thread receives, and closing of its sockets."""

import subprocess
import sys
import threading
import time

import pytest
from megatron_infer.server.run import _close
from waitress.server import create_server

CODE = """
import signal, threading
from queue import SimpleQueue
from megatron_infer.server.run import _first

received = SimpleQueue()
signal.signal(signal.SIGTERM, lambda number, frame: received.put(number))

def take():
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Timer(0.5, take).start()
print(_first(received) == signal.SIGTERM)
"""


def test_a_signal_that_another_thread_receives_is_handled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_thread_that_waits_for_sockets_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_infer.server.run.FLUSH_SECONDS", 1000.0)
    server = create_server(lambda environ, start: [], listen="127.0.0.1:0", threads=1)
    loop = threading.Thread(target=server.run)
    closed_by = []

    def close(original=server.close) -> None:
        time.sleep(0.05)
        original()
        closed_by.append(threading.current_thread())

    server.close = close
    loop.start()
    closing = threading.Thread(target=_close, args=(server,), daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()  # it does not wait longer than needed
    assert closed_by == [loop]  # they are closed when the function returns
    loop.join(timeout=60)
    assert not loop.is_alive()
