"""The names in a checkpoint directory, and which of them are complete checkpoints.

``iter_0001000``                  a checkpoint, if its manifest and files are whole
``iter_0001000.tmp-<id>``         a save under way, or what a killed one left
``iter_0001000.replaced-<id>``    the former checkpoint while a new one takes its name
``iter_0001000.trash-<id>``       on its way out
"""

import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError
from megatron_ckpt.paths import file_size, read_bytes
from megatron_ckpt.store.durable import rename
from megatron_ckpt.store.lock import is_being_written
from megatron_ckpt.store.manifest import MANIFEST, Manifest

POINTER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})(?:\.(tmp|replaced|trash)-[0-9a-f]+)?")


@dataclass(frozen=True)
class Candidate:
    """A directory that is or was to become a checkpoint; ``error`` says what it lacks."""

    iteration: int
    path: Path
    manifest: Manifest | None
    error: str | None

    @property
    def was_complete(self) -> bool:
        """Whether it has, or had, the final name of a checkpoint, which only complete ones get."""
        match = _NAME.fullmatch(self.path.name)
        return match is not None and match[2] != "tmp"


def iteration_name(iteration: int) -> str:
    """Name of the directory of an iteration."""
    return f"iter_{iteration:07d}"


def sibling_path(path: Path, kind: str) -> Path:
    """Returns a new name beside ``path`` for a directory of ``kind`` (tmp, replaced, trash)."""
    plain = path.name.partition(".")[0]
    return path.with_name(f"{plain}.{kind}-{uuid.uuid4().hex[:12]}")


def entries(directory: Path) -> list[tuple[int, str, Path]]:
    """List ``(iteration, kind, path)``, newest first; kind is empty for plain names, which lead."""
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), match[2] or "", path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda entry: (-entry[0], entry[1], entry[2].name))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint and checks that each file is there at its size.

    Raises:
        CorruptCheckpointError: the checkpoint is torn; says what is missing.
        CheckpointError: a name or a link in it leads out of the folder, or to no regular file.
    """
    try:
        manifest = Manifest.from_bytes(read_bytes(path, MANIFEST), path / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpointError(f"{path} is torn: it has no {MANIFEST}") from None
    for name, record in manifest.files.items():
        try:
            size = file_size(path, name)
        except (FileNotFoundError, NotADirectoryError):
            raise CorruptCheckpointError(f"{path} is torn: {name} is missing") from None
        if size != record.size:
            raise CorruptCheckpointError(
                f"{path} is torn: {name} has {size} bytes, the manifest says {record.size}"
            )
    return manifest


def inspect_directory(iteration: int, path: Path) -> Candidate:
    """Looks whether ``path`` is a complete checkpoint of ``iteration``."""
    try:
        manifest = read_manifest(path)
    except (CheckpointError, OSError) as error:
        return Candidate(iteration, path, None, str(error))
    if manifest.iteration != iteration:
        reason = f"{path} holds iteration {manifest.iteration}: it was renamed"
        return Candidate(iteration, path, None, reason)
    return Candidate(iteration, path, manifest, None)


def scan_directories(directory: Path) -> Iterator[Candidate]:
    """Look at what is in a checkpoint directory, newest first, as far as the caller goes.

    Unfinished saves are left out while a writer is at work: they may be about to be finished.
    """
    complete = set()
    for iteration, kind, path in entries(directory):
        if kind == "tmp" and not is_being_written(directory):
            yield Candidate(iteration, path, None, f"{path} is an unfinished save")
        elif kind == "" or (kind == "replaced" and iteration not in complete):
            candidate = inspect_directory(iteration, path)
            if candidate.manifest:
                complete.add(iteration)
            yield candidate


def delete_checkpoint(path: Path) -> None:
    """Removes a checkpoint: under its name it is there whole or not at all."""
    trash = path if ".trash-" in path.name else sibling_path(path, "trash")
    if trash != path:
        rename(path, trash)
    shutil.rmtree(trash)


def remove_leftovers(directory: Path) -> None:
    """Clears what killed saves left. The caller holds the writer lock."""
    for path in directory.glob(f"{POINTER}.tmp-[0-9]*"):  # written under the lock alone
        path.unlink()
    for iteration, kind, path in entries(directory):
        if kind in ("tmp", "trash"):
            shutil.rmtree(path)
        elif kind == "replaced":
            final = directory / iteration_name(iteration)
            if not final.exists():
                rename(path, final)
            elif inspect_directory(iteration, final).manifest:
                delete_checkpoint(path)
