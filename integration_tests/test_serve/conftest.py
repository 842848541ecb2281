"""`megatron-infer serve` as a process, with a tiny model that can write long texts."""

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer
from megatron_models import GPT, GPTConfig, Placement, record_of
from megatron_parallel import Mesh, collect_shardings, parameter_views
from preloaded import Preloaded

READY = re.compile(r"serving .* at http://([^ ]+):(\d+) ")


class Server:
    """A running server; `log` contains its standard error."""

    def __init__(self, preloaded: Preloaded, *options: str) -> None:
        program = Path(sys.executable).with_name("megatron-infer")
        self.process = preloaded.start(
            [program, "serve", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.log: list[str] = []
        self._ready: queue.Queue[re.Match[str] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = self._ready.get(timeout=240)
        assert found, "".join(self.log)
        self.host, self.port = found[1], int(found[2])
        self.url = f"http://{self.host}:{self.port}"

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if found := READY.search(line):
                self._ready.put(found)
        self._ready.put(None)

    def connect(self, timeout: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def ask(self, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        """Returns status and JSON of a request on a new connection."""
        connection = self.connect()
        body = json.dumps(fields) if fields else None
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=120)
        self._reader.join(timeout=60)
        return status


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run whose checkpoint is a small random model with 4096 positions."""
    folder = tmp_path_factory.mktemp("served")
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=257,
        max_position_embeddings=4096,
        init_method_std=0.3,
        untie_embeddings_and_output_weights=True,
    )
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float32), seed=7)
    with (
        torch.no_grad()
    ):  # a channel that suppresses the end of the document, so that texts can be long
        model.final_norm.bias[0] = 10.0
        model.output.weight[:, 0] = 0.0
        model.output.weight[256, 0] = -100.0
    ByteTokenizer().save(folder / "tokenizer")
    CheckpointStore(folder / "run").save(
        3,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord(family="gpt2", **record_of(config)),
        files={"tokenizer": folder / "tokenizer"},
    )
    return folder / "run"


@pytest.fixture(scope="session")
def start(run_folder: Path, preloaded: Preloaded) -> Iterator[Callable[..., Server]]:
    """Returns a function that starts servers, which are stopped after the test."""
    started: list[Server] = []

    def begin(*options: str) -> Server:
        started.append(Server(preloaded, "--load", str(run_folder), *options))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


@pytest.fixture(scope="session")
def server(start: Callable[..., Server]) -> Server:
    """Returns one server for all tests that do not change it."""
    return start("--max-tokens-per-request", "600000")
