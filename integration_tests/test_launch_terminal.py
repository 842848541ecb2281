"""Two ranks in a terminal: the progress bar is shown, and Ctrl-C stops all ranks after a step."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_data import IndexedDatasetBuilder

WORDS = (
    "pretrain gpt --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--vocab-size 128 --micro-batch-size 2 --train-iters 1000000 --lr 1e-4 --eval-iters 0 "
    "--train-data-path text --tensor-model-parallel-size 2 --nproc-per-node 2 --save run "
    "--log-interval 1000000"
)
OWN_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.screen = ""
        self._master, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("WORLD_SIZE", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *words],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment,
        )
        os.close(theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read_until(self, pattern: str, seconds: float = 300) -> str:
        """Reads until the screen contains ``pattern``; returns the whole screen."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.screen):
            assert time.monotonic() < deadline, self.screen
            if not self._read():
                break
        assert re.search(pattern, self.screen), self.screen
        return self.screen

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 120)[0]:
            raise TimeoutError(self.screen)
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux reports a closed other end in this way
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def terminal(tmp_path):
    with IndexedDatasetBuilder(str(tmp_path / "text"), "uint16") as builder:
        for start in range(50):
            builder.add_item([(start + i) % 64 for i in range(80)])
            builder.end_document()
        builder.finalize()
    script = Path(sys.executable).with_name("megatron-train")
    started = Terminal(tmp_path, str(script), *WORDS.split())
    yield started
    started.close()


def test_the_bar_moves_and_ctrl_c_stops_after_a_step_with_a_checkpoint(terminal, tmp_path):
    terminal.read_until(r"training: .*\d+ *k?tok/s")
    terminal.press(b"\x03")
    screen = terminal.read_until(
        r"stopped after step (\d+) of 1000000: SIGINT; saved in run/iter_0*\1; "
        r"the same command with --load run continues it"
    )
    assert "SIGINT: stopping after this step; send it again to stop at once" in screen
    assert terminal.end() == 130
    step = int(re.search(r"stopped after step (\d+)", screen)[1])
    assert find_checkpoint(tmp_path / "run").iteration == step
    assert "error" not in terminal.screen and "Traceback" not in terminal.screen
