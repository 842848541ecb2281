"""Ctrl-C ends every long command with status 130, one line and no incomplete file."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron_ckpt import find_checkpoint
from megatron_data import ByteTokenizer, IndexedDatasetBuilder
from preloaded import Preloaded

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 512 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --eval-iters 0"
)
TRAIN = f"megatron-train pretrain gpt {SIZES} --data-path text --tokenizer-model bytes"


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """Restores the handler of SIGINT, which is ignored in processes that a script backgrounds."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
    run_command: Callable[[Path, str], "subprocess.CompletedProcess[str]"],
) -> Path:
    """Returns a folder with tokens, a tokenizer, a large corpus and a run of one step."""
    folder = tmp_path_factory.mktemp("interrupted")
    ByteTokenizer().save(folder / "bytes")
    with IndexedDatasetBuilder(str(folder / "text"), "uint16") as builder:
        for first in range(40):
            builder.add_item([(first + i) % 250 for i in range(600)])
            builder.end_document()
        builder.finalize()
    with (folder / "corpus.jsonl").open("w") as lines:
        for number in range(200_000):
            lines.write(f'{{"text": "sentence {number} of a long, long book"}}\n')
    run_command(folder, f"{TRAIN} --train-iters 1 --save trained")
    return folder


def start(
    command: str, folder: Path, begin: Callable[..., "subprocess.Popen[str]"] = subprocess.Popen
) -> "subprocess.Popen[str]":
    name, *words = command.split()
    return begin(
        [Path(sys.executable).with_name(name), *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def interrupt(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Sends SIGINT to the process and its children, as a terminal does; returns further output."""
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=240)


def wait_for(seen: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 240
    while not seen():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_training_ends_after_its_step_with_a_checkpoint_that_loads(
    place: Path, run_command: Callable[[Path, str], "subprocess.CompletedProcess[str]"]
) -> None:
    words = f"{TRAIN} --save run --no-progress --log-interval 1"
    process = start(f"{words} --train-iters 100000", place)
    for line in process.stdout or ():
        if re.search(r"iteration +2/", line):
            break
    out, err = interrupt(process)
    assert process.returncode == 130
    # The first line warns that the corpus has no manifest.
    assert err.strip().splitlines()[1:] == [
        "SIGINT: stopping after this step; send it again to stop at once"
    ]
    (step,) = re.findall(r"^stopped after step (\d+) of 100000: SIGINT", out, re.MULTILINE)
    assert find_checkpoint(place / "run").iteration == int(step)
    assert [path.name for path in (place / "run").glob("iter_*")] == [f"iter_{int(step):07}"]
    again = run_command(place, f"{words} --load run --train-iters {step}")
    assert f"continuing from run after step {step}" in again.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocessing_keeps_only_complete_chunks_and_continues(place: Path, workers: int) -> None:
    words = "megatron-data preprocess --input corpus.jsonl --tokenizer-model bytes"
    command, parts = f"{words} --output-prefix out --workers {workers}", place / ".out.parts"
    process = start(command, place)
    wait_for(lambda: bool(list(parts.glob("*.part"))), process)
    _, err = interrupt(process)
    assert (process.returncode, err) == (130, "megatron-data: interrupted\n")
    assert not list(place.glob("*out_text*"))
    assert {path.suffix for path in parts.iterdir()} == {".part", ".json", ""}, "incomplete output"
    out, err = start(command, place).communicate(timeout=240)
    assert "chunks were finished by an earlier run\n" in out and not err
    assert not parts.exists()
    for path in place.glob("out_text*"):
        path.unlink()


SLOW = pytest.mark.slow
INSTANTS = [0.0, 0.1, *(pytest.param(seconds, marks=SLOW) for seconds in (0.05, 0.2, 0.4))]


@pytest.mark.parametrize("seconds", INSTANTS)
def test_workers_that_are_starting_print_nothing(place: Path, seconds: float) -> None:
    words = "megatron-data preprocess --input corpus.jsonl --tokenizer-model bytes"
    process = start(f"{words} --output-prefix early --workers 2", place)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: bool(children.read_text().split()), process)
    time.sleep(seconds)
    _, err = interrupt(process)
    assert (process.returncode, err) == (130, "megatron-data: interrupted\n")
    assert not list(place.glob("*early_text*"))


def test_generation_keeps_written_lines_and_reports_them(place: Path, preloaded: Preloaded) -> None:
    words = "megatron-infer generate --load trained --prompt abc --max-new-tokens 4000"
    process = start(words, place, preloaded.start)
    assert process.stdout and process.stdout.read(3) == "abc"
    _, err = interrupt(process)
    assert (process.returncode, err) == (130, "megatron-infer: interrupted\n")
