"""Fixtures of the integration tests."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_parallel.testing import WorkerPool
from megatron_train.cli import main
from megatron_train.metrics import peak, plot
from preloaded import Preloaded

# Modules that runs import. None of them starts a thread, which `Preloaded` checks.
RUNS = (
    "megatron_models.models.bert.kind",
    "megatron_models.models.encoder_decoder.kind",
    "megatron_models.models.gpt.model",
    "megatron_models.models.hybrid.kind",
    "megatron_models.models.mamba.kind",
    "megatron_train.pretrain",
    "megatron_train.tasks.bert_kind",
    "megatron_train.tasks.classification_kind",
    "megatron_train.tasks.gpt",
    "megatron_train.tasks.t5_kind",
)
MODULES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "megatron_ckpt.cli",
    "megatron_data.cli",
    "megatron_data.datasets.build",
    "megatron_data.torch",
    "megatron_infer.cli",
    "megatron_train.cli.rank",
    "plain_runs",
    "tokenizers",
    "torch.distributed.pipelining",
    *RUNS,
)


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
def rank_pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Returns ranks on the CPU with Gloo or, in ``nox -s gpu``, on all CUDA devices with NCCL."""
    return request.getfixturevalue("worker_pool" if request.param == "cpu" else "device_pool")


@pytest.fixture(scope="module")
def worker_pool_preload() -> tuple[str, ...]:
    return RUNS


@pytest.fixture(scope="session")
def command() -> Callable[[str], list[str]]:
    """Returns a function that splits a command line.

    Programs are those beside this Python, or on the path where nothing is installed
    (``tooling/gpu.sh``).
    """

    def split(line: str) -> list[str]:
        name, *words = line.split()
        beside = Path(sys.executable).with_name(name)
        return [str(beside) if beside.exists() else shutil.which(name) or name, *words]

    return split


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Returns programs that are forked from a process which has already imported torch."""
    server = Preloaded(MODULES)
    yield server
    server.close()


@pytest.fixture(scope="session")
def run_command(
    command: Callable[[str], list[str]], preloaded: Preloaded
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Returns a function that runs a command in a folder and asserts success without traceback.

    Unless ``whole``, it leaves out what ``plain_runs`` does.
    """

    def run(folder: Path, line: str, *, whole: bool = False) -> "subprocess.CompletedProcess[str]":
        done = preloaded.run(
            command(line),
            before=None if whole else "plain_runs:leave_out",
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def plain_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes most of a short run in this process, and returns nothing.

    Runs measure no peak and draw no curve: the file of the plot exists and is empty. They do not
    wait for the disk. `whole` in test_pretrain.py has all three; the tests of megatron-ckpt count
    what is synced.
    """
    monkeypatch.setattr(peak, "measured_peak", lambda *_: peak.Peak(1e11, "a constant"))
    monkeypatch.setattr(plot, "plot_losses", lambda records, loss, path: path.write_bytes(b""))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def train_in(
    plain_runs: None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[[str], list[str]],
    preloaded: Preloaded,
) -> Iterator[Callable[[Path], Callable[..., str]]]:
    """Returns a function that changes to a folder and returns a `megatron-train` to call there.

    This takes the words of a command and its exit status, 0 by default. It runs the command in this
    process, or in a fork that starts its ranks as forks, and returns what the command prints.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(words: str, status: int = 0) -> str:
        if "--nproc-per-node" in words:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            line, before = command(f"megatron-train {words}"), "plain_runs:leave_out"
            found = preloaded.run(line, before=before, env=environment).returncode
        else:
            found = main(words.split())
        printed = "".join(capfd.readouterr())
        assert found == status, printed
        return printed

    def enter(folder: Path) -> Callable[..., str]:
        monkeypatch.chdir(folder)
        return run

    yield enter
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory,
    run_command: Callable[..., "subprocess.CompletedProcess[str]"],
) -> Path:
    """Returns a folder with tokenizer, `train_text_document` and `valid_text_document`."""
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(1)
    phrases = ("the whale", "the white sea", "a ship", "sails on", "and the captain", "sees")
    for name, count in (("train", 150), ("valid", 60)):
        texts = [" ".join(words.choice(phrases) for _ in range(40)) for _ in range(count)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    options = "--input train.jsonl --vocab-size 300 --output tokenizer"
    run_command(folder, f"megatron-data train-tokenizer {options}")
    for name in ("train", "valid"):
        options = f"--input {name}.jsonl --output-prefix {name} --tokenizer-model tokenizer"
        run_command(folder, f"megatron-data preprocess {options} --append-eod")
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Returns a headless Chromium of this machine, controlled by playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"there is no browser on this machine: none of {', '.join(names)}")
    with playwright.sync_playwright() as driver:
        # Containers often run tests as root, where Chromium cannot set up its sandbox.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        yield driver.chromium.launch(executable_path=found, args=options)
