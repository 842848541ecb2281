"""A directory of checkpoints: save, choose, load."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ckpt.coordinator import Coordinator, SingleProcessCoordinator, map_reduce
from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError
from megatron_ckpt.store.checkpoint import Checkpoint, LoadedState
from megatron_ckpt.store.directory import (
    Candidate,
    inspect_directory,
    iteration_name,
    scan_directories,
)
from megatron_ckpt.store.foreign import describe_foreign_checkpoint
from megatron_ckpt.store.manifest import MANIFEST, Manifest, ModelRecord
from megatron_ckpt.store.reader import Cast, check_names
from megatron_ckpt.store.retention import Retention
from megatron_ckpt.store.transaction import Transaction
from megatron_ckpt.store.writer import (
    Contribution,
    RankFiles,
    Shard,
    describe_shards,
    split_state,
    write_shards,
)
from megatron_ckpt.views import ViewLike

log = logging.getLogger("megatron_ckpt")


def _quiet(count: int) -> None:
    """Shows no progress."""


class CheckpointStore:
    """Checkpoints of one run, in one directory that all its ranks share.

    Every rank makes a store and calls `save`, `load` and `latest` together with the others: each of
    them returns on all ranks or raises on all.

    Args:
        directory: made by the first save.
        coordinator: how ranks talk; one process if not given. `DistributedCoordinator` serves runs
            on `torch.distributed`.
    """

    def __init__(self, directory: str | Path, coordinator: Coordinator | None = None) -> None:
        self.directory = Path(directory)
        self.coordinator: Coordinator = coordinator or SingleProcessCoordinator()

    def path(self, iteration: int) -> Path:
        """Returns the directory of an iteration."""
        return self.directory / iteration_name(iteration)

    def save(
        self,
        iteration: int,
        state: Mapping[str, object],
        *,
        model: ModelRecord | None = None,
        files: Mapping[str, bytes | Path] | None = None,
        retention: Retention | None = None,
        replace: bool = False,
        progress: Callable[[int], object] = _quiet,
    ) -> Path:
        """Saves a checkpoint; when this returns it is complete and on disk.

        A failure on any rank, at any point, leaves every earlier checkpoint as it was.

        Args:
            iteration: from 0.
            state: by name either a list of views, or a plain value (None, bool, int, float, str,
                bytes, list, tuple, dict). Tensors named like another with a suffix
                (``weight.exp_avg`` beside ``weight``) go to a file of their own, so that the model
                can be read without them. A plain value has to be equal on all ranks that give it.
            model: family and configuration, from which others build the model (rank 0's count).
            files: further files by the name they shall have: content, or a path to copy from; a
                folder is copied whole (rank 0's count).
            retention: what to remove afterwards (rank 0's counts).
            replace: whether a complete checkpoint of this iteration may be replaced.
            progress: called with the bytes of each tensor this rank has written.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: bad views, an overlap or a hole, another writer, an existing
                checkpoint, or another rank's failure.
            OSError: this rank could not write.
        """
        transaction = Transaction(
            self.directory,
            iteration,
            model=model,
            files=files or {},
            retention=retention,
            replace=replace,
        )
        return save_shards(self.coordinator, transaction, lambda: split_state(state), progress)

    def load(
        self,
        iteration: int | None,
        into: Mapping[str, Sequence[ViewLike]],
        *,
        groups: Sequence[str] | None = None,
        cast: Cast = "refuse",
        verify: bool = True,
        progress: Callable[[int], object] = _quiet,
    ) -> LoadedState:
        """Fills views of any layout in place, from a checkpoint of any layout.

        Only the byte ranges the views need are read, and with ``verify`` the blocks around them,
        whose digests are checked before anything is copied. After an error the tensors hold
        undefined values.

        Args:
            iteration: to load; None is the newest that is complete. One that turns out damaged
                while it is read is then named in a warning and the one before it is taken.
            into: views by tensor name. A rank names what it holds; all ranks together have to name
                every tensor of the chosen groups.
            groups: ``model`` or ``optim`` to load just these; None is everything.
            cast: ``refuse`` wants equal dtypes, ``floating`` converts floating point.
            verify: whether digests are checked. Sizes always are.
            progress: called with the bytes of each piece copied.

        Returns:
            The plain values by name, with the iteration they are from.

        Raises:
            CorruptCheckpointError: the iteration named is torn or damaged.
            CheckpointError: there is no checkpoint; missing or unexpected names, with the nearest;
                other shapes or dtypes.
        """
        shapes = {name: tuple(views[0].global_shape) for name, views in into.items() if views}
        damaged: list[Path] = []

        def choose(ranks: list[dict[str, tuple[int, ...]]]) -> tuple[str, bytes]:
            path, manifest = self._choose(iteration, damaged)
            wanted = {name: shape for rank in ranks for name, shape in rank.items()}
            check_names(manifest.tensors, wanted, groups)
            return str(path), manifest.to_bytes()

        while True:
            chosen, content = map_reduce(self.coordinator, lambda: shapes, choose)
            path = Path(chosen)
            checkpoint = Checkpoint(path, Manifest.from_bytes(content, path / MANIFEST))
            try:
                return self._fill(checkpoint, into, cast, verify, progress)
            except CorruptCheckpointError as error:
                if iteration is not None:
                    raise
                self._warn(f"{path} is damaged and passed over: {error}")
                damaged.append(path)

    def latest_iteration(self) -> int | None:
        """Returns the newest complete iteration, or None; torn ones are named in one warning.

        Raises:
            CorruptCheckpointError: all that were complete are damaged; see `newest`.
        """

        def choose(_: list[None]) -> int | None:
            newest, torn = self._open_latest()
            if torn:
                then = f"iteration {newest.iteration} is used" if newest else "there is no other"
                log.warning("%s; %s", "; ".join(str(c.error) for c in torn), then)
            return newest.iteration if newest else None

        newest: int | None = map_reduce(self.coordinator, lambda: None, choose)
        return newest

    def latest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None where none was ever completed.

        This rank looks for itself. Saves that were not completed count as none.

        Raises:
            CorruptCheckpointError: there is no complete checkpoint, but one that was complete and
                is damaged: its directory has its final name, which only complete ones get. A run
                that began anew here would write over what can perhaps be mended.
            CheckpointError: the checkpoints are another program's.
        """
        return self._open_latest()[0]

    def _open_latest(self) -> tuple[Checkpoint | None, list[Candidate]]:
        newest, torn = self.find_latest()
        if newest is not None:
            return Checkpoint(newest.path, newest.manifest), torn
        if damaged := [candidate for candidate in torn if candidate.was_complete]:
            if what := describe_foreign_checkpoint(self.directory):
                raise CheckpointError(f"{self.directory} {what}")
            more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
            raise CorruptCheckpointError(
                f"{self.directory} has damaged checkpoints and no whole one: "
                f"{damaged[0].error}{more}; restore them, move them away, or give another folder"
            )
        return None, torn

    def find_latest(self, exclude: Iterable[Path] = ()) -> tuple[Candidate | None, list[Candidate]]:
        """Returns the newest complete checkpoint and what is torn before it.

        This rank looks for itself. "Complete" means a valid manifest and every file at its size;
        digests are checked by reading.
        """
        torn: list[Candidate] = []
        for candidate in scan_directories(self.directory):
            if candidate.manifest and candidate.path not in exclude:
                return candidate, torn
            if not candidate.manifest:
                torn.append(candidate)
        return None, torn

    def _fill(
        self,
        checkpoint: Checkpoint,
        into: Mapping[str, Sequence[ViewLike]],
        cast: Cast,
        verify: bool,
        progress: Callable[[int], object],
    ) -> LoadedState:
        loaded: list[LoadedState] = []

        def load() -> None:
            checkpoint.load_tensors(into, cast=cast, verify=verify, progress=progress)
            loaded.append(checkpoint.values())

        map_reduce(self.coordinator, load, lambda _: None)
        return loaded[0]

    def _choose(self, iteration: int | None, damaged: Sequence[Path]) -> tuple[Path, Manifest]:
        if iteration is not None:
            return self._find_iteration(iteration)
        newest, torn = self.find_latest(exclude=damaged)
        reasons = "; ".join(str(candidate.error) for candidate in torn)
        if newest is None or newest.manifest is None:
            if what := describe_foreign_checkpoint(self.directory):
                raise CheckpointError(f"{self.directory} {what}")
            raise CheckpointError(
                f"{self.directory} has no complete checkpoint" + (f": {reasons}" if torn else "")
            )
        if torn and not damaged:
            log.warning("%s; iteration %d is used", reasons, newest.iteration)
        return newest.path, newest.manifest

    def _find_iteration(self, iteration: int) -> tuple[Path, Manifest]:
        for candidate in scan_directories(self.directory):
            if candidate.iteration == iteration and candidate.manifest:
                return candidate.path, candidate.manifest
        path = self.path(iteration)
        if path.exists():
            raise CorruptCheckpointError(str(inspect_directory(iteration, path).error))
        known = ", ".join(str(c.iteration) for c in scan_directories(self.directory) if c.manifest)
        raise CheckpointError(
            f"{self.directory} has no checkpoint of iteration {iteration}; it has "
            + (known or "none")
        )

    def _warn(self, message: str) -> None:
        if self.coordinator.rank == 0:
            log.warning(message)


def save_shards(
    coordinator: Coordinator,
    transaction: Transaction,
    make: Callable[[], tuple[list[Shard], dict[str, str]]],
    progress: Callable[[int], object] = _quiet,
) -> Path:
    """Saves the slabs and values that ``make`` gives; elements are made when they are written."""
    shards: list[Shard] = []

    def describe() -> dict[str, Any]:
        held, values = make()
        shards.extend(held)
        return describe_shards(held, values).to_plain()

    def begin(ranks: list[dict[str, Any]]) -> str:
        return str(transaction.begin([Contribution.from_plain(rank) for rank in ranks]))

    def commit(ranks: list[dict[str, Any]]) -> None:
        transaction.commit([RankFiles.from_plain(rank) for rank in ranks])

    with transaction:
        path = Path(map_reduce(coordinator, describe, begin))
        rank, world_size = coordinator.rank, coordinator.world_size
        map_reduce(
            coordinator,
            lambda: write_shards(path, shards, rank, world_size, progress).to_plain(),
            commit,
        )
    return transaction.final


def find_checkpoint(path: str | Path, iteration: int | None = None) -> Checkpoint:
    """Opens a checkpoint by its own directory, or the newest (or named) one of a store's directory.

    For readers of one process; ranks that read together use `CheckpointStore.load`.

    Raises:
        CorruptCheckpointError: the checkpoint named is torn.
        CheckpointError: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        what = (
            describe_foreign_checkpoint(path)
            or "is not a directory; give a checkpoint or a run's directory"
        )
        raise CheckpointError(f"{path} {what}")
    itself = re.match(r"iter_\d{7}", path.name) or (path / MANIFEST).exists()
    if itself:
        if iteration is not None and Checkpoint(path).iteration != iteration:
            raise CheckpointError(f"{path} is not iteration {iteration}: give its parent directory")
        return Checkpoint(path)
    return Checkpoint(*CheckpointStore(path)._choose(iteration, ()))
