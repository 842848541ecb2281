"""The subdirectories of a checkpoint directory and whether they are complete checkpoints.

``iter_0001000``                  a checkpoint, if its manifest and files are complete
``iter_0001000.tmp-<id>``         a save in progress, or the remains of a killed one
``iter_0001000.replaced-<id>``    the former checkpoint while a new one replaces it
``iter_0001000.trash-<id>``       a checkpoint that is being deleted
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
    """A directory that may be a checkpoint; ``error`` is the reason why it is not complete."""

    iteration: int
    path: Path
    manifest: Manifest | None
    error: str | None

    @property
    def was_complete(self) -> bool:
        """Whether the directory has, or had, the final name that only complete checkpoints get."""
        match = _NAME.fullmatch(self.path.name)
        return match is not None and match[2] != "tmp"


def iteration_name(iteration: int) -> str:
    """Returns the name of the directory of an iteration."""
    return f"iter_{iteration:07d}"


def sibling_path(path: Path, kind: str) -> Path:
    """Returns a new path beside ``path`` for a directory of ``kind`` (tmp, replaced, trash)."""
    plain = path.name.partition(".")[0]
    return path.with_name(f"{plain}.{kind}-{uuid.uuid4().hex[:12]}")


def entries(directory: Path) -> list[tuple[int, str, Path]]:
    """Returns ``(iteration, kind, path)``, newest first.

    The kind is empty for plain names, which precede the other kinds of an iteration.
    """
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), match[2] or "", path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found, key=lambda entry: (-entry[0], entry[1], entry[2].name))


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint and checks that each file exists with its size.

    Raises:
        CorruptCheckpointError: The checkpoint is torn; names what is missing.
        CheckpointError: A name or a link in it leads out of the folder or to a file that is not
            regular.
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
                f"{path} is torn: {name} has {size} bytes instead of {record.size} in the manifest"
            )
    return manifest


def inspect_directory(iteration: int, path: Path) -> Candidate:
    """Returns whether ``path`` is a complete checkpoint of ``iteration``, as a candidate."""
    try:
        manifest = read_manifest(path)
    except (CheckpointError, OSError) as error:
        return Candidate(iteration, path, None, str(error))
    if manifest.iteration != iteration:
        reason = f"{path} was renamed: its manifest has iteration {manifest.iteration}"
        return Candidate(iteration, path, None, reason)
    return Candidate(iteration, path, manifest, None)


def scan_directories(directory: Path) -> Iterator[Candidate]:
    """Yields the candidates in a checkpoint directory, newest first, on request.

    Unfinished saves are left out while a process is saving, because they may be in progress.
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
    """Deletes a checkpoint. Renaming it first avoids a partial checkpoint under its name."""
    trash = sibling_path(path, "trash")
    rename(path, trash)
    shutil.rmtree(trash)


def remove_leftovers(directory: Path) -> None:
    """Removes what killed saves left. The caller holds the writer lock."""
    for path in directory.glob(f"{POINTER}.tmp-[0-9]*"):  # only written under the lock
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
