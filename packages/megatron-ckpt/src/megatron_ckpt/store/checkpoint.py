"""One complete checkpoint: a directory with a valid manifest."""

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
    """The plain values of a loaded checkpoint by name, and the checkpoint they were loaded from."""

    def __init__(self, values: Mapping[str, Any], checkpoint: "Checkpoint") -> None:
        super().__init__(values)
        self.checkpoint = checkpoint

    @property
    def iteration(self) -> int:
        """The iteration that was loaded."""
        return self.checkpoint.iteration


class Checkpoint:
    """A complete checkpoint, open for reading.

    ``Checkpoint(path)`` reads the manifest and checks that every file exists with the size in the
    manifest. Bytes are compared with their digests when they are read.

    Raises:
        CorruptCheckpointError: The directory is torn; the message names what is missing.
    """

    def __init__(self, path: str | Path, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest = manifest or read_manifest(self.path)

    @property
    def iteration(self) -> int:
        """The iteration after which the checkpoint was saved."""
        return self.manifest.iteration

    @property
    def digest(self) -> str:
        """The digest of the manifest, which covers every file. Equal states have equal digests."""
        return self.manifest.digest

    @property
    def model(self) -> ModelRecord | None:
        """The kind, family and configuration of the model; None if the save did not record them."""
        return self.manifest.model

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """Every global tensor: dtype, shape, group and pieces."""
        return self.manifest.tensors

    def values(self) -> LoadedState:
        """Returns the plain values without reading a tensor."""
        try:
            content = loads(self.read_file(STATE))
        except CheckpointError as error:
            raise CorruptCheckpointError(f"{self.path / STATE}: {error}") from error
        if not isinstance(content, dict):
            raise CorruptCheckpointError(f"{self.path / STATE} is not a JSON object")
        return LoadedState({str(name): value for name, value in content.items()}, self)

    def read_file(self, name: str) -> bytes:
        """Returns the content of a file of the checkpoint after checking its digests."""
        if name not in self.manifest.files:
            raise CheckpointError(
                f"{self.path} has no file {name!r}{did_you_mean(name, self.manifest.files)}"
            )
        record = self.manifest.files[name]
        if record.size > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{self.path / name} has {record.size} bytes; the limit for reading a file into "
                f"memory is {MAX_FILE_BYTES}"
            )
        with BlockReader(self.path, name, record) as reader:
            content = bytearray(record.size)
            reader.read_into(content, 0)
        return bytes(content)

    def verified_folder(self, name: str) -> Path:
        """Returns a folder of attached files, such as ``tokenizer``, after checking every digest.

        Use it for readers that need a folder instead of the bytes that `read_file` returns.

        Raises:
            CorruptCheckpointError: A file in the folder differs from the manifest or is not listed
                there.
            CheckpointError: The checkpoint has no such folder, or a link leads out of it.
        """
        listed = [file for file in self.manifest.files if file.startswith(f"{name}/")]
        if not listed:
            raise CheckpointError(f"{self.path} has no folder {name!r}")
        folder = self.path / name
        for below, folders, files in os.walk(folder):
            links = [each for each in folders if (Path(below) / each).is_symlink()]
            for each in (*links, *files):
                file = (Path(below) / each).relative_to(self.path).as_posix()
                if file not in self.manifest.files:
                    raise CorruptCheckpointError(
                        f"{self.path / file} is not in the manifest, so it was not saved with the "
                        "checkpoint; remove it"
                    )
        for file in listed:
            with BlockReader(self.path, file, self.manifest.files[file]) as reader:
                reader.check()
        return folder

    def read_tensor(self, name: str) -> "Tensor":
        """Returns a whole tensor in its stored dtype on the CPU, after checking its digests."""
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
        """Checks names and global shapes of tensors before memory is allocated for them.

        Args:
            shapes: The global shapes by name of all tensors to load.
            groups: The groups of the checkpoint whose tensors must all be in ``shapes``. Defaults
                to all groups.

        Raises:
            CheckpointError: Names the first tensor that is missing, unexpected or of another shape.
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

        Does not communicate with other ranks. ``remote_shapes`` has the global shapes by name of
        the tensors that only other ranks load.
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
        """Fills the views in place. Tensors of the checkpoint without a view are not read."""
        check_views(self.tensors, into, cast)
        load_views(self.path, self.manifest, into, verify=verify, progress=progress)

    def verify(self, progress: Callable[[int], object] = lambda count: None) -> list[str]:
        """Checks every digest of every file and returns one line for each damaged file."""
        problems = []
        for name, record in self.manifest.files.items():
            try:
                with BlockReader(self.path, name, record) as reader:
                    reader.check(progress)
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
        return problems


class CheckpointTensors(Mapping[str, "Tensor"]):
    """The tensors of one group of a checkpoint as a mapping that reads each tensor on request."""

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
        """Returns the tensors on the meta device: shapes and dtypes without content."""
        import torch

        from megatron_ckpt.dtypes import torch_dtype

        return {
            name: torch.empty(record.shape, dtype=torch_dtype(record.dtype), device="meta")
            for name, record in self._records.items()
        }
