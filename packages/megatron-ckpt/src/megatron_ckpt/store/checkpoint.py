"""One complete checkpoint: a directory with a valid manifest, wherever it lies."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError, did_you_mean
from megatron_ckpt.paths import MAX_FILE_BYTES
from megatron_ckpt.store.blocks import BlockReader
from megatron_ckpt.store.directory import read_manifest
from megatron_ckpt.store.manifest import Manifest, ModelRecord, TensorRecord
from megatron_ckpt.store.reader import Cast, check_names, check_views, load_views
from megatron_ckpt.values import loads
from megatron_ckpt.views import View, ViewLike

if TYPE_CHECKING:
    from torch import Tensor

STATE = "state.json"


class LoadedState(dict[str, Any]):
    """The plain values of a loaded checkpoint by name, and which checkpoint it was."""

    def __init__(self, values: Mapping[str, Any], checkpoint: "Checkpoint") -> None:
        super().__init__(values)
        self.checkpoint = checkpoint

    @property
    def iteration(self) -> int:
        """The iteration that was loaded."""
        return self.checkpoint.iteration


class Checkpoint:
    """A complete checkpoint, open for reading.

    ``Checkpoint(path)`` reads the manifest and checks that every file is there at its size; bytes
    are checked against their digests when they are read.

    Raises:
        CorruptCheckpointError: the directory is torn; the message says what is missing.
    """

    def __init__(self, path: str | Path, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest = manifest or read_manifest(self.path)

    @property
    def iteration(self) -> int:
        """Iteration after which the checkpoint was saved."""
        return self.manifest.iteration

    @property
    def digest(self) -> str:
        """Digest of the manifest and, through it, of every file: equal states have equal ones."""
        return self.manifest.digest

    @property
    def model(self) -> ModelRecord | None:
        """Kind, family and configuration of the model, if they were given when saving."""
        return self.manifest.model

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """Every global tensor: dtype, shape, group and pieces."""
        return self.manifest.tensors

    def values(self) -> LoadedState:
        """Returns the plain values, without any tensor."""
        try:
            content = loads(self.read_file(STATE))
        except CheckpointError as error:
            raise CorruptCheckpointError(f"{self.path / STATE}: {error}") from error
        if not isinstance(content, dict):
            raise CorruptCheckpointError(f"{self.path / STATE} is not a JSON object")
        return LoadedState({str(name): value for name, value in content.items()}, self)

    def read_file(self, name: str) -> bytes:
        """Returns the checked content of a file of the checkpoint."""
        if name not in self.manifest.files:
            raise CheckpointError(
                f"{self.path} has no file {name!r}{did_you_mean(name, self.manifest.files)}"
            )
        record = self.manifest.files[name]
        if record.size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{self.path / name} has {record.size} bytes; at most {MAX_FILE_BYTES} are read "
                "as a whole"
            )
        with BlockReader(self.path, name, record) as reader:
            content = bytearray(record.size)
            reader.read_into(content, 0)
        return bytes(content)

    def verified_folder(self, name: str) -> Path:
        """Returns a folder of attached files, such as ``tokenizer``, after checking every digest.

        For readers that want a folder rather than the bytes that `read_file` returns.

        Raises:
            CorruptCheckpointError: a file in it differs from the manifest, or is not listed there.
            CheckpointError: the checkpoint has no such folder, or a link leads out of it.
        """
        listed = [file for file in self.manifest.files if file.startswith(f"{name}/")]
        if not listed:
            raise CheckpointError(f"{self.path} has no files in a folder {name!r}")
        folder = self.path / name
        for below, folders, files in os.walk(folder):
            links = [each for each in folders if (Path(below) / each).is_symlink()]
            for each in (*links, *files):
                file = (Path(below) / each).relative_to(self.path).as_posix()
                if file not in self.manifest.files:
                    raise CorruptCheckpointError(
                        f"{self.path / file} is not in the manifest, so it was not saved with the "
                        "checkpoint: remove it"
                    )
        for file in listed:
            with BlockReader(self.path, file, self.manifest.files[file]) as reader:
                reader.check()
        return folder

    def read_tensor(self, name: str) -> "Tensor":
        """Returns a whole tensor in its stored dtype, on the CPU, checked."""
        import torch

        from megatron_ckpt.dtypes import torch_dtype

        if name not in self.tensors:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}{did_you_mean(name, self.tensors)}"
            )
        record = self.tensors[name]
        view = View.whole(torch.empty(record.shape, dtype=torch_dtype(record.dtype)))
        load_views(self.path, self.manifest, {name: [view]})
        return view.tensor

    def check_shapes(
        self, shapes: Mapping[str, Sequence[int]], groups: Sequence[str] | None = None
    ) -> None:
        """Checks names and global shapes of tensors before memory is taken for them.

        Args:
            shapes: by name, of all that is to be loaded.
            groups: groups of the checkpoint whose tensors must all be among them; None is all.

        Raises:
            CheckpointError: names the first tensor that is missing, left over or of another shape.
        """
        check_names(self.tensors, {n: tuple(shape) for n, shape in shapes.items()}, groups)

    def load(
        self,
        into: Mapping[str, Sequence[ViewLike]],
        *,
        remote_shapes: Mapping[str, Sequence[int]] | None = None,
        groups: Sequence[str] | None = None,
        cast: Cast = "refuse",
        verify: bool = True,
        progress: Callable[[int], object] = lambda count: None,
    ) -> LoadedState:
        """Fills the views in place and returns the plain values; see `CheckpointStore.load`.

        Names are compared without the other ranks. ``remote_shapes`` has global shapes by name of
        tensors that need no place here, because other ranks load them.
        """
        wanted = {name: tuple(shape) for name, shape in (remote_shapes or {}).items()}
        wanted |= {name: tuple(views[0].global_shape) for name, views in into.items() if views}
        check_names(self.tensors, wanted, groups)
        self.load_tensors(into, cast=cast, verify=verify, progress=progress)
        return self.values()

    def load_tensors(
        self,
        into: Mapping[str, Sequence[ViewLike]],
        *,
        cast: Cast = "refuse",
        verify: bool = True,
        progress: Callable[[int], object] = lambda count: None,
    ) -> None:
        """Fills the views in place; tensors of the checkpoint that are not named stay unread."""
        check_views(self.tensors, into, cast)
        load_views(self.path, self.manifest, into, verify=verify, progress=progress)

    def verify(self, progress: Callable[[int], object] = lambda count: None) -> list[str]:
        """Checks every digest of every file; return one line for each damaged file."""
        problems = []
        for name, record in self.manifest.files.items():
            try:
                with BlockReader(self.path, name, record) as reader:
                    reader.check(progress)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
        return problems


class CheckpointTensors(Mapping[str, "Tensor"]):
    """The tensors of one group of a checkpoint as a mapping that reads when asked."""

    def __init__(self, checkpoint: Checkpoint, group: str = "model") -> None:
        self._checkpoint = checkpoint
        self._records = {n: r for n, r in checkpoint.tensors.items() if r.group == group}

    def __getitem__(self, name: str) -> "Tensor":
        if name not in self._records:
            raise KeyError(name)
        return self._checkpoint.read_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def meta(self) -> dict[str, "Tensor"]:
        """Returns tensors of the same shapes and dtypes without content."""
        import torch

        from megatron_ckpt.dtypes import torch_dtype

        return {
            name: torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="meta")
            for name, record in self._records.items()
        }
