"""A directory of checkpoints: saving, finding and loading them."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """Ignores progress."""


class CheckpointStore:
    """The checkpoints of one run, in a directory that all its ranks share.

    Every rank creates a store. All ranks call `save`, `load` and `latest_iteration` together; each
    call either returns on all ranks or raises on all.

    Args:
        directory: The directory, which the first save creates.
        coordinator: The communication between ranks. Defaults to one process. Use a
            `DistributedCoordinator` for runs on `torch.distributed`.
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
        """Saves a checkpoint. When this method returns, the checkpoint is complete and on disk.

        A failure on any rank, at any time, leaves all earlier checkpoints unchanged.

        Args:
            iteration: The iteration, from 0.
            state: For each name either a list of views or a plain value (None, bool, int, float,
                str, bytes, list, tuple, dict). A tensor whose name is another tensor's name with a
                suffix (``weight.exp_avg`` beside ``weight``) is written to a separate file, so that
                the model can be read without it. A plain value must be equal on all ranks that have
                it.
            model: The kind, family and configuration of the model. Only rank 0's is used.
            files: Further files by name: their content, or a path to copy from. A folder is copied
                with all its files. Only rank 0's are used.
            retention: The rule for removing older checkpoints afterwards. Only rank 0's is used.
            replace: Whether to replace an existing complete checkpoint of this iteration. Defaults
                to False.
            progress: Called with the bytes of each tensor that this rank has written.

        Returns:
            The directory of the checkpoint.

        Raises:
            CheckpointError: Views are invalid, overlap or leave a gap; another process is writing;
                the checkpoint exists; or another rank failed.
            OSError: This rank could not write.
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
        unused: Collection[str] = (),
        cast: Cast = "refuse",
        verify: bool = True,
        progress: Callable[[int], object] = _quiet,
    ) -> LoadedState:
        """Fills views of any layout in place, from a checkpoint of any layout.

        Reads only the byte ranges that the views need; if ``verify``, also the rest of their
        blocks, whose digests are checked before anything is copied. After an error the content of
        the tensors is undefined.

        Args:
            iteration: The iteration to load, or None for the newest complete one. If that one turns
                out to be damaged while it is read, a warning names it and the previous one is
                loaded.
            into: Views by tensor name. A rank names the tensors that it holds; all ranks together
                must name every tensor of the chosen groups.
            groups: ``model`` or ``optim`` to load only these tensors. Defaults to all.
            unused: Further tensors of the checkpoint that no rank needs to name, such as heads that
                the model does not have. Defaults to none.
            cast: ``refuse`` requires equal dtypes, ``floating`` converts floating-point dtypes.
            verify: Whether to check digests. Sizes are always checked. Defaults to True.
            progress: Called with the bytes of each piece copied.

        Returns:
            The plain values by name, with the iteration that they were loaded from.

        Raises:
            CorruptCheckpointError: The given iteration is torn or damaged.
            CheckpointError: There is no checkpoint; a name is missing or unexpected (the message
                has the nearest name); or a shape or dtype differs.
        """
        shapes = {name: tuple(views[0].global_shape) for name, views in into.items() if views}
        damaged: list[Path] = []

        def choose(ranks: list[dict[str, tuple[int, ...]]]) -> tuple[str, bytes]:
            path, manifest = self._choose(iteration, damaged)
            wanted = {name: shape for rank in ranks for name, shape in rank.items()}
            stored = {n: held for n, held in manifest.tensors.items() if n not in {*unused}}
            check_names(stored, wanted, groups)
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
                self._warn(f"{path} is damaged and skipped: {error}")
                damaged.append(path)

    def latest_iteration(self) -> int | None:
        """Returns the newest complete iteration, or None. One warning names torn checkpoints.

        Raises:
            CorruptCheckpointError: All checkpoints that were complete are damaged; see
                `latest_checkpoint`.
        """

        def choose(_: list[None]) -> int | None:
            newest, torn = self._open_latest()
            if torn:
                then = f"using iteration {newest.iteration}" if newest else "there is no other"
                log.warning("%s; %s", "; ".join(str(c.error) for c in torn), then)
            return newest.iteration if newest else None

        newest: int | None = map_reduce(self.coordinator, lambda: None, choose)
        return newest

    def latest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None if no save was ever completed.

        Does not communicate with other ranks. Unfinished saves do not count.

        Raises:
            CorruptCheckpointError: No checkpoint is complete, but a directory with the name of a
                complete one is damaged. Raised so that a new run does not overwrite a checkpoint
                that may be repairable.
            CheckpointError: The checkpoints are those of another program.
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
                f"{self.directory} has damaged checkpoints and no complete one: "
                f"{damaged[0].error}{more}; restore or move them, or use another folder"
            )
        return None, torn

    def find_latest(self, exclude: Iterable[Path] = ()) -> tuple[Candidate | None, list[Candidate]]:
        """Returns the newest complete checkpoint and the newer torn ones.

        Does not communicate with other ranks. A complete checkpoint has a valid manifest and every
        file with its size. Digests are not checked.

        Args:
            exclude: Directories to skip.
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
                f"{self.directory} has no complete checkpoint"
                + (f": {reasons}" if torn else "; give the folder of a run or one checkpoint")
            )
        if torn and not damaged:
            log.warning("%s; using iteration %d", reasons, newest.iteration)
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
    """Saves the shards and values that ``make`` returns; elements are produced when written."""
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
    """Opens a checkpoint by its own directory, or the newest or given one of a store's directory.

    Does not communicate with other ranks; ranks that load together use `CheckpointStore.load`.

    Args:
        path: The directory of a checkpoint or of a store.
        iteration: The iteration to open. Defaults to the newest complete one.

    Raises:
        CorruptCheckpointError: The given checkpoint is torn.
        CheckpointError: There is no such checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        what = (
            describe_foreign_checkpoint(path)
            or "is not a directory; use a checkpoint or the directory of a run"
        )
        raise CheckpointError(f"{path} {what}")
    itself = re.match(r"iter_\d{7}", path.name) or (path / MANIFEST).exists()
    if itself:
        if iteration is not None and Checkpoint(path).iteration != iteration:
            raise CheckpointError(f"{path} is not iteration {iteration}; use its parent directory")
        return Checkpoint(path)
    return Checkpoint(*CheckpointStore(path)._choose(iteration, ()))
