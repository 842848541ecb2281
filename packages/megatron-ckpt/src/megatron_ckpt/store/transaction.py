"""The steps of a save on rank 0: lock, prepare, commit and clean up."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.store.directory import (
    POINTER,
    delete_checkpoint,
    inspect_directory,
    iteration_name,
    remove_leftovers,
    scan_directories,
    sibling_path,
)
from megatron_ckpt.store.durable import rename, replace_file, sync_directory
from megatron_ckpt.store.lock import writer_lock
from megatron_ckpt.store.manifest import ModelRecord
from megatron_ckpt.store.retention import Retention
from megatron_ckpt.store.writer import (
    Contribution,
    RankFiles,
    check_contributions,
    commit,
    expand_attachments,
)

log = logging.getLogger("megatron_ckpt")


class Transaction:
    """One save on rank 0. Leaving the context removes everything that was not committed.

    Args:
        directory: The directory of the store.
        iteration: The iteration to save.
        model: As for `CheckpointStore.save`.
        files: As for `CheckpointStore.save`.
        retention: As for `CheckpointStore.save`.
        replace: As for `CheckpointStore.save`.
    """

    def __init__(
        self,
        directory: Path,
        iteration: int,
        *,
        model: ModelRecord | None,
        files: Mapping[str, bytes | Path],
        retention: Retention | None,
        replace: bool,
    ) -> None:
        self.directory, self.iteration = directory, iteration
        self.final = directory / iteration_name(iteration)
        self.model, self.files, self.retention, self.replace = model, files, retention, replace
        self._temporary = sibling_path(self.final, "tmp")
        self._contributions: Sequence[Contribution] = ()
        self._values: dict[str, str] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def begin(self, contributions: Sequence[Contribution]) -> Path:
        """Checks the contributions, takes the lock, and returns a new directory to write into."""
        self._values = check_contributions(contributions)
        self._contributions = contributions
        expand_attachments(self.files)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._cleanup.enter_context(writer_lock(self.directory))
        remove_leftovers(self.directory)
        if self.final.exists() and not self.replace and not self._is_torn():
            raise CheckpointError(
                f"{self.final} exists and is complete; save with replace=True to replace it, or "
                "use another directory for the run"
            )
        self._temporary.mkdir()
        self._cleanup.callback(shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def commit(self, written: Sequence[RankFiles]) -> None:
        """Completes the directory and gives it its final name, which makes it a checkpoint."""
        commit(
            self._temporary,
            self.iteration,
            self._contributions,
            written,
            self._values,
            self.model,
            self.files,
        )
        former = None
        if self.final.exists():
            former = sibling_path(self.final, "replaced")
            rename(self.final, former)
        rename(self._temporary, self.final)
        sync_directory(self.directory.parent)
        try:
            if former:
                delete_checkpoint(former)
            replace_file(self.directory / POINTER, f"{self.iteration}\n".encode())
            self._retain()
        except OSError as error:
            log.warning("%s is saved, but cleaning up failed: %s", self.final, error)

    def _is_torn(self) -> bool:
        return inspect_directory(self.iteration, self.final).manifest is None

    def _retain(self) -> None:
        if self.retention is None or self.retention.latest is None:
            return  # all checkpoints are kept, so no manifest has to be read
        complete = {c.iteration: c.path for c in scan_directories(self.directory) if c.manifest}
        for iteration in self.retention.to_delete(complete):
            if iteration != self.iteration:
                delete_checkpoint(complete[iteration])
