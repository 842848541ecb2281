"""A signal that another thread takes does not wake the main thread, which has to notice it."""

import subprocess
import sys

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


def test_a_signal_that_another_thread_takes_is_noticed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
