"""Fixtures: ranks as threads, failing system calls, small blocks, forged files, a family."""

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from megatron_ckpt.store import blocks, manifest, reader

# The first import of torch takes seconds, which would count against the first example.
settings.register_profile("ckpt", deadline=None)
settings.load_profile("ckpt")

#: The calls of a save that change the disk or make changes durable.
CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Meeting:
    """The meeting point at which threads that act as ranks exchange objects."""

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=20)


class ThreadRank:
    """The coordinator of one thread of a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, len(meeting.values)

    def gather(self, value: Any) -> list[Any] | None:
        values = self._share(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        return self._share(value)[0]

    def _share(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Returns ``on_ranks(n, call)``: results or exceptions of ``call(coordinator)``."""

    def run(world_size: int, call: Callable[[ThreadRank], Any]) -> list[Any]:
        meeting = Meeting(world_size)

        def one(rank: int) -> Any:
            try:
                return call(ThreadRank(meeting, rank))
            except Exception as error:  # noqa: BLE001 - returned to the test
                return error

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(one, range(world_size)))

    return run


class Death(BaseException):
    """Simulates the death of the process."""


class Disk:
    """Counts the calls that reach the disk and lets the process die, or the disk fill, at one.

    A dead process does nothing more: every later call dies too. What was written but not synced
    is lost by `lose_power`.
    """

    def __init__(self, at: int | None = None, full: bool = False) -> None:
        self.at, self.full = at, full
        self.log: list[tuple[str, str]] = []
        self._real = {name: getattr(os, name) for name in CALLS}
        self._dirty: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator["Disk"]:
        for name in CALLS:
            setattr(os, name, self._wrap(name))
        try:
            yield self
        finally:
            for name in CALLS:
                setattr(os, name, self._real[name])

    def lose_power(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._dirty:
                os.truncate(path, 0)

    def _wrap(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            self.log.append((name, str(args[0])))
            now = len(self.log) - 1
            if self.full and self.at is not None and now >= self.at and name in ("write", "open"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
            if not self.full and self.at is not None and now >= self.at:
                if name == "write" and now == self.at:
                    real(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    self._dirty.add(os.fstat(args[0]).st_ino)
                raise Death
            if name == "write":
                self._dirty.add(os.fstat(args[0]).st_ino)
            if name == "fsync":
                self._dirty.discard(os.fstat(args[0]).st_ino)
                return None  # skipped, which saves milliseconds
            return real(*args, **kwargs)

        return call


@pytest.fixture
def disk() -> type[Disk]:
    return Disk


@pytest.fixture
def death() -> type[BaseException]:
    return Death


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Reduces the sizes of blocks, reads and rows, so that small tensors cross all boundaries."""
    for module in (blocks, manifest):
        monkeypatch.setattr(module, "BLOCK_SIZE", 256)
    monkeypatch.setattr(reader, "_READ_BYTES", 96)
    monkeypatch.setattr(reader, "_SEEK", 24)
    return 256


@pytest.fixture
def forge() -> Callable[..., None]:
    """``forge(folder, change)`` lets ``change`` edit a manifest and gives it its digest again."""

    def run(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
        path = folder / manifest.MANIFEST
        content = json.loads(path.read_bytes())
        change(content)
        content["digest"] = "0" * 32
        data = (json.dumps(content, indent=0) + "\n").encode()
        path.write_bytes(data.replace(b"0" * 32, blocks.digest(data).encode(), 1))

    return run


@pytest.fixture
def no_hang(folder: Path) -> Iterator[None]:
    """Fails a test that waits for minutes, as a pipe without a writer lets a reader wait.

    It begins after ``folder``, which imports most of torch.
    """

    def stop(*_: object) -> None:
        pytest.fail("two minutes have passed")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@dataclass
class ToyConfig:
    num_layers: int
    vocab: int = 5
    base: float = 100.0
    dim: int = 8

    def to_json(self) -> str:
        return json.dumps(asdict(self))


TOY = SimpleNamespace(
    name="toy",
    architectures=("ToyModel",),
    ignored=(
        ("old.{i}", "causal_mask", {}),
        ("low", "at_most", {"value": -1e4}),
        ("turns", "rotary_frequencies", {"base": "$base", "dim": "$dim"}),
        ("head", "same_as", {"other": "net.word", "rows": "$vocab"}),
    ),
    prefix="net.",
    defers_to=(),
    if_absent={},
    former_endings={},
    active_rows=lambda config: [
        ("word", ["net.word"], [("slice_rows", {"rows": "$vocab"})]),
        ("layers.{i}.w", ["net.{i}.a", "net.{i}.b"], [("concat", {"dim": 0})]),
    ],
    config_from_hf=lambda values: ToyConfig(values["depth"]),
    config_to_hf=lambda config: {"architectures": ["ToyModel"], "depth": config.num_layers},
    kind="toys",
    config_version=3,
    config_from_record=lambda values, version: ToyConfig(**values),
    differences=lambda config: ["dim = 8, this one has 9"] if config.dim == 9 else [],
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Makes the made-up family the only installed one."""
    family = SimpleNamespace(**vars(TOY))
    monkeypatch.setitem(sys.modules, "toy_family", SimpleNamespace(FAMILY=family))
    entry = EntryPoint("toy", "toy_family:FAMILY", "megatron.families")
    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: [entry])
    return family


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a Hugging Face folder with a model of the made-up family."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "theirs"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"architectures": ["ToyModel"], "depth": 2, "eos": 3, "dtype": "float64"})
    )
    (path / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    tensors = {"net.word": torch.randn(5, 2)}
    tensors |= {f"net.{i}.{x}": torch.randn(3, 2) for i in range(2) for x in "ab"}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
