"""Tests that interrupted runs are resumed, to the same bytes, without parts of other jobs."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_data import DataError, IndexedDataset, preprocess, verify
from megatron_data.cli import main
from megatron_data.preprocessing.parts import JOB, WorkFolder
from megatron_data.tokenizers import NullTokenizer

LINES = [f'{{"text": "{number} {number * 7}"}}\n' for number in range(2000)]
CHUNK = 1000

SCRIPT = """
import sys, time
from megatron_data import preprocess, tokenizers

class NullTokenizer(tokenizers.NullTokenizer):
    def encode_batch(self, texts):
        time.sleep(0.005)
        return super().encode_batch(texts)

if __name__ == "__main__":
    print("ready", flush=True)
    made, = preprocess(
        [sys.argv[1]], sys.argv[2], NullTokenizer(20_000), append_eod=True, chunk_bytes=1000,
        workers=int(sys.argv[3]),
    )
    print("done", made.chunks, made.resumed_chunks, flush=True)
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(LINES))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "o"


@pytest.fixture
def run(corpus: Path, out: Path, tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts the slow job in another process, and returns once it is working."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)

    def start(workers: int = 1, **options: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(script), str(corpus), str(out), str(workers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    return start


def undisturbed(corpus: Path, folder: Path) -> dict[str, bytes]:
    preprocess([corpus], folder / "o", NullTokenizer(20_000), append_eod=True, chunk_bytes=CHUNK)
    return files_in(folder)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def wait_for_parts(process: "subprocess.Popen[str]", out: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(parts_of(out).glob("*.part"))) < number:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def parts_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.parts")


def interrupted(corpus: Path, out: Path, after: int = 10, **options: object) -> None:
    """Interrupts a run in this process after some chunks."""
    seen = []

    class Interrupted(NullTokenizer):
        def encode_batch(self, texts: object) -> list[list[int]]:
            seen.append(1)
            if len(seen) > after:
                raise KeyboardInterrupt
            return super().encode_batch(texts)  # type: ignore[arg-type]

    settings = {"append_eod": True, "chunk_bytes": CHUNK, **options}
    with pytest.raises(KeyboardInterrupt):
        preprocess([corpus], out, Interrupted(20_000), **settings)  # type: ignore[arg-type]


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 50))]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_runs_resume_to_the_bytes_of_an_uninterrupted_run(
    seed: int,
    corpus: Path,
    out: Path,
    tmp_path: Path,
    run: Callable[..., "subprocess.Popen[str]"],
) -> None:
    wanted = undisturbed(corpus, tmp_path / "undisturbed")
    choose = random.Random(seed)
    kept = 0
    for _ in range(2):
        process = run(workers=choose.choice((1, 2)))
        time.sleep(choose.uniform(0.0, 0.5))
        if process.poll() is None:
            killed(process)
            for path in out.parent.glob("o_*"):
                assert path.read_bytes() == wanted[path.name], "whole, or not there"
        kept = len(list(parts_of(out).glob("*.part")))
    process = run(workers=choose.choice((1, 2)))
    shown, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert not error
    assert int(shown.split()[2]) == kept
    assert files_in(out.parent) == wanted, "the same bytes, and no litter"


def test_parts_are_never_without_their_job_while_they_are_removed(
    corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, described = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        really(path, missing_ok)
        folder = parts_of(out)
        if path.parent == folder and any(folder.glob("*.part")):
            described.append((folder / JOB).exists())

    monkeypatch.setattr(Path, "unlink", unlink)
    preprocess([corpus], out, NullTokenizer(20_000), chunk_bytes=CHUNK)
    assert len(described) > 12
    assert all(described), "killed here, the next run would take them for another job's"


def test_a_killed_run_is_resumed(
    corpus: Path, out: Path, tmp_path: Path, run: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = run()
    wait_for_parts(process, out, 12)
    killed(process)
    kept = {path.name: path.read_bytes() for path in parts_of(out).glob("*.part")}
    with pytest.raises(DataError, match="no dataset at"):
        IndexedDataset(f"{out}_text_document")
    (made,) = preprocess(
        [corpus], out, NullTokenizer(20_000), append_eod=True, chunk_bytes=CHUNK, workers=1
    )
    assert made.resumed_chunks == len(kept) >= 12
    assert made.chunks > made.resumed_chunks
    assert files_in(out.parent) == undisturbed(corpus, tmp_path / "undisturbed")


def test_workers_end_with_the_process_that_started_them(
    out: Path, run: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = run(workers=2)
    wait_for_parts(process, out, 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    killed(process)
    deadline = time.monotonic() + 120
    while any(running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(process: "subprocess.Popen[str]") -> list[str]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_worker_is_reported_and_the_run_can_be_resumed(
    corpus: Path, out: Path, tmp_path: Path, run: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = run(workers=2)
    wait_for_parts(process, out, 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(int(workers[0]), signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert "a worker process died" in error
    (made,) = preprocess(
        [corpus], out, NullTokenizer(20_000), append_eod=True, chunk_bytes=CHUNK, workers=1
    )
    assert made.resumed_chunks >= 3
    assert files_in(out.parent) == undisturbed(corpus, tmp_path / "undisturbed")


def test_two_processes_never_work_on_one_output(
    corpus: Path, out: Path, run: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = run()
    wait_for_parts(process, out, 1)
    with pytest.raises(DataError, match="another process is writing"):
        preprocess([corpus], out, NullTokenizer(20_000))
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_ctrl_c_keeps_finished_chunks_and_prints_one_line(
    corpus: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(corpus, out, chunk_bytes=1 << 20, after=0)
    assert not files_in(out.parent), "nothing was done, nothing is kept"
    interrupted(corpus, out)
    assert len(list(parts_of(out).glob("*.part"))) == 10
    assert [path.name for path in out.parent.iterdir()] == [".o.parts"]
    preprocess([corpus], out, NullTokenizer(20_000), append_eod=True, chunk_bytes=CHUNK)
    assert files_in(out.parent) == undisturbed(corpus, tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"append_eod": False}, "end of document"),
        ({"chunk_bytes": 999}, "chunk bytes"),
        ({"max_document_bytes": 10_000}, "max document bytes"),
        ({"tokenizer": NullTokenizer(30_000)}, "end of document, tokenizer"),
    ],
)
def test_parts_of_another_job_are_not_reused(
    options: dict[str, object],
    what: str,
    corpus: Path,
    out: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupted(corpus, out)
    settings = {"append_eod": True, "chunk_bytes": CHUNK, **options}
    tokenizer = settings.pop("tokenizer", NullTokenizer(20_000))
    (made,) = preprocess([corpus], out, tokenizer, **settings)  # type: ignore[arg-type]
    (warning,) = caplog.messages
    assert warning == (
        f"{parts_of(out)} holds 10 parts of another job ({what} differ); they are removed and "
        "the run starts again"
    )
    assert made.resumed_chunks == 0
    verify(made.prefix)


def test_only_chunks_with_the_same_content_are_reused(
    corpus: Path, out: Path, tmp_path: Path
) -> None:
    interrupted(corpus, out)
    text = corpus.read_text()
    corpus.write_text(text.replace('"5 35"', '"5 36"').replace('"900 6300"', '"900 6301"'))
    damaged = parts_of(out) / "00000004.part"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (parts_of(out) / "00000005.part").write_bytes(b"")
    (parts_of(out) / "00000006.4711").write_bytes(b"half")
    (made,) = preprocess([corpus], out, NullTokenizer(20_000), append_eod=True, chunk_bytes=CHUNK)
    assert made.resumed_chunks == 7, "of ten, one of another content and two that the disk lost"
    assert files_in(out.parent) == undisturbed(corpus, tmp_path / "undisturbed")


def test_parts_without_tallies_of_older_versions_are_reused(
    corpus: Path, out: Path, tmp_path: Path
) -> None:
    interrupted(corpus, out)
    for path in parts_of(out).glob("*.part"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        record = json.loads(data[8:start])
        assert (record.pop("tallies"), record.pop("others")) == ({}, "")
        older = json.dumps(record).encode()
        path.write_bytes(len(older).to_bytes(8, "little") + older + data[start:])
    (made,) = preprocess([corpus], out, NullTokenizer(20_000), append_eod=True, chunk_bytes=CHUNK)
    assert made.resumed_chunks == 10
    assert files_in(out.parent) == undisturbed(corpus, tmp_path / "undisturbed")


def test_chunks_before_a_corrected_line_are_reused(
    corpus: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = corpus.read_text().splitlines(keepends=True)
    corpus.write_text("".join([*lines[:1500], "{\n", *lines[1500:]]))
    settings = {"append_eod": True, "chunk_bytes": CHUNK}
    with pytest.raises(DataError, match=r"a\.jsonl:1501: not JSON"):
        preprocess([corpus], out, NullTokenizer(20_000), **settings)  # type: ignore[arg-type]
    (made,) = preprocess(
        [corpus],
        out,
        NullTokenizer(20_000),
        on_error="skip",
        **settings,  # type: ignore[arg-type]
    )
    assert made.resumed_chunks > 10 and made.skipped.documents == 1
    assert made.counts.documents == 2000


def test_the_command_reports_that_it_resumes(
    corpus: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_data.preprocessing.encoding.SMALLEST_CHUNK", CHUNK)
    interrupted(corpus, out, chunk_bytes=None)
    command = ["preprocess", "--input", str(corpus), "--output-prefix", str(out), "--append-eod"]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "20000"]
    assert main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("10 of ") and shown[0].endswith("were finished by an earlier run")


def test_a_full_disk_is_one_line_and_the_run_can_be_resumed(
    corpus: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files simulates a full disk: parts are below it, the .bin is not."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))\n"
    (tmp_path / "job.py").write_text(
        limit + "from megatron_data.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
    )
    monkeypatch.setattr("megatron_data.preprocessing.encoding.SMALLEST_CHUNK", CHUNK)
    interrupted(corpus, out, chunk_bytes=None)
    kept = len(list(parts_of(out).glob("*.part")))
    command = ["preprocess", "--input", str(corpus), "--output-prefix", str(out), "--append-eod"]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "20000"]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py"), *command],
        capture_output=True,
        text=True,
        check=False,
        # The limit would also truncate bytecode files, which later imports would read.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") <= 2, done.stderr
    assert f": {os.strerror(errno.EFBIG)}\n" in done.stderr
    assert not list(out.parent.glob("*.bin")) and not list(out.parent.glob("*.idx"))
    assert main(command) == 0
    verify(f"{out}_text_document")
    assert kept == 10


def test_a_folder_is_released_and_removed(tmp_path: Path) -> None:
    job = {"a": 1}
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with WorkFolder(str(tmp_path / "o"), job), pytest.raises(DataError, match="another process"):
        WorkFolder(str(tmp_path / "o"), job)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208
    with WorkFolder(str(tmp_path / "o"), job) as folder:
        (folder.path / "00000000.part").write_bytes(b"")
    assert json.loads((tmp_path / ".o.parts" / "job.json").read_text()) == job
    with WorkFolder(str(tmp_path / "o"), job) as folder:
        folder.mark_finished()
    assert not list(tmp_path.iterdir())


def test_a_folder_is_taken_again_if_the_previous_run_has_just_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is gone before the lock is opened; the lock is gone, or another, once locked."""
    lock, really, flock, locked = tmp_path / ".o.parts" / "lock", os.open, fcntl.flock, []
    removed: list[Path] = []

    def open_after(path: object, *rest: int, **named: int) -> int:
        if path == lock and not removed:
            lock.parent.rmdir()
            removed.append(lock)
        return really(path, *rest, **named)  # type: ignore[arg-type]

    def lock_after(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        locked.append(descriptor)
        if len(locked) < 3:
            lock.unlink()
        if len(locked) == 2:
            lock.touch()

    monkeypatch.setattr(os, "open", open_after)
    monkeypatch.setattr(fcntl, "flock", lock_after)
    with WorkFolder(str(tmp_path / "o"), {"a": 1}):
        assert lock.exists()
    assert removed and len(locked) == 4  # the last one is that of job.json
    assert len({*locked[:3]}) == 1, "each is closed before the next is opened"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("record", [b"{", b"[]", b"{}", b'{"span": [1], "faults": []}'])
def test_a_part_with_a_damaged_record_is_not_used(tmp_path: Path, record: bytes) -> None:
    task: Any = SimpleNamespace(number=0)
    with WorkFolder(str(tmp_path / "o"), {"a": 1}) as folder:
        assert folder.find_record(task) is None  # there is none
        path = folder.path / "00000000.part"
        path.write_bytes(len(record).to_bytes(8, "little") + record)
        assert folder.find_record(task) is None
        with pytest.raises(DataError, match=rf"{path} was damaged; run the same command again"):
            folder.read(0, ())
