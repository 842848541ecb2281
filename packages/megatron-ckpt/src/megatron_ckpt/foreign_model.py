"""A model in Hugging Face's format or in a GGUF file, loaded without writing a checkpoint."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.dtypes import dtype_name, item_size, torch_dtype
from megatron_ckpt.errors import CheckpointError, did_you_mean
from megatron_ckpt.families import detect_family, find_family
from megatron_ckpt.formats.huggingface import CONFIG
from megatron_ckpt.formats.opening import open_source
from megatron_ckpt.json_input import Fields
from megatron_ckpt.ops.ignored import check_ignored, matches
from megatron_ckpt.ops.interpreter import check_source
from megatron_ckpt.ops.rows import Row, expand
from megatron_ckpt.paths import read_bytes
from megatron_ckpt.store.blocks import digest
from megatron_ckpt.store.manifest import MANIFEST, ModelRecord
from megatron_ckpt.store.reader import Cast, check_names, check_views
from megatron_ckpt.store.writer import MODEL
from megatron_ckpt.views import Box, ViewLike

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def is_foreign_model(path: str | Path) -> bool:
    """Returns whether a path is a file, or a folder with ``config.json`` and without a manifest."""
    path = Path(path)
    return path.is_file() or ((path / CONFIG).is_file() and not (path / MANIFEST).exists())


@dataclass(frozen=True)
class ForeignTensor:
    """The safetensors dtype and the shape of one of our tensors after conversion."""

    dtype: str
    shape: tuple[int, ...]
    group: str = MODEL

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return item_size(self.dtype)


class ForeignModel:
    """A Hugging Face folder or a GGUF file, with its tensors under our names.

    The constructor reads the configuration and the names, shapes and dtypes of all tensors. A
    tensor is read and converted on request, so memory holds the tensors of one row of the family.
    `load_tensors` reads only the boxes of foreign tensors that the views need.

    Args:
        path: A folder with ``config.json`` and safetensors, or a GGUF file.
        family: The name of the family. Defaults to the family that reads ``architectures``.

    Attributes:
        path: The given path.
        model: The family and the model configuration, converted from the foreign one.
        tensors: The dtype and global shape of every tensor, by our names.
        files: The files that a checkpoint keeps, by their names there: ``tokenizer/...``,
            ``huggingface/...``.
        notes: Sentences about files of weights that are not read.
        digest: A digest of the configuration and of the names, dtypes and shapes of the tensors.

    Raises:
        CheckpointError: There is no such model, or a family, configuration or tensor does not fit.
    """

    def __init__(self, path: str | Path, *, family: str | None = None) -> None:
        self.path = Path(path)
        source = open_source(path)
        names = architectures(source.config, source.where)
        kind = find_family(family) if family else detect_family(names)
        config = call_with_path(source.where, kind.config_from_hf, source.config)
        self._tensors = source.open_tensors(kind.prefix, kind.former_endings)
        meta = self._meta = self._tensors.meta()
        if changes := _absent(kind.if_absent, meta):
            config = call_with_path(source.where, kind.config_from_hf, {**source.config, **changes})
        rows = expand(kind.active_rows(config), config, len(meta))
        check_source(rows, meta, ignored=[entry[0] for entry in kind.ignored])
        check_ignored(rows, config, self._tensors, kind.ignored)
        self._rows = {name: row for row in rows for name in row.ours}
        converted: dict[str, Tensor] = {}
        for row in rows:
            converted |= zip(
                row.ours, row.forward([meta[name] for name in row.theirs]), strict=True
            )
        self.tensors: Mapping[str, ForeignTensor] = {
            name: ForeignTensor(dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in converted.items()
        }
        fields = json.loads(config.to_json())
        self.model = ModelRecord(kind.kind, kind.name, kind.config_version, fields)
        self.files = dict(source.files)
        self.notes = source.notes()
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}
        content = json.dumps([kind.name, self.model.config, shapes], sort_keys=True)
        self.digest = digest(content.encode())

    def read_tensor(self, name: str, dtype: "torch.dtype | None" = None) -> "Tensor":
        """Reads and converts a whole tensor.

        Args:
            name: Our name of the tensor.
            dtype: The dtype of a floating-point tensor. Defaults to that in `tensors`. Quantized
                tensors are rounded once, to this dtype.

        Raises:
            CheckpointError: There is no such tensor.
        """
        if name not in self._rows:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}{did_you_mean(name, self._rows)}"
            )
        row = self._rows[name]
        converted = row.forward([self._tensors[theirs] for theirs in row.theirs])
        tensor = converted[row.ours.index(name)]
        wanted = dtype or torch_dtype(self.tensors[name].dtype)
        return tensor.to(wanted) if tensor.is_floating_point() else tensor

    def read_file(self, name: str) -> bytes:
        """Returns the content of one of `files`."""
        if name not in self.files:
            raise CheckpointError(
                f"{self.path} has no file {name!r}{did_you_mean(name, self.files)}"
            )
        file = self.files[name]
        return file if isinstance(file, bytes) else read_bytes(file.parent, file.name)

    def check_shapes(
        self, shapes: Mapping[str, Sequence[int]], groups: Sequence[str] | None = None
    ) -> None:
        """Checks names and global shapes before memory is allocated; see `Checkpoint`."""
        wanted = {name: tuple(shape) for name, shape in shapes.items()}
        check_names(self.tensors, wanted, groups)

    def load_tensors(
        self,
        into: Mapping[str, Sequence[ViewLike]],
        *,
        cast: Cast = "refuse",
        progress: Callable[[int], object] = lambda count: None,
    ) -> None:
        """Fills the views in place. Tensors without a view are not read.

        Args:
            into: Views by our global names.
            cast: Whether other floating-point dtypes are converted.
            progress: Called with the bytes of each view filled.
        """
        check_views(self.tensors, into, cast)
        for name, views in into.items():
            if not views:
                continue
            row = self._rows[name]
            meta = [self._meta[theirs] for theirs in row.theirs]

            def get(at: int, box: Box, row: Row = row) -> "Tensor":
                return self._tensors.box(row.theirs[at], box)

            for view in views:
                box = Box(tuple(view.offsets), tuple(view.lengths))
                if box.numel:  # operations such as stacking have no empty boxes
                    view.tensor.detach().copy_(row.read_box(name, box, meta, get))
                progress(box.numel * self.tensors[name].item_size)


def _absent(if_absent: Mapping[str, Mapping[str, Any]], names: Collection[str]) -> dict[str, Any]:
    """Returns the settings of a file without the tensors that its ``config.json`` counts."""
    changes: dict[str, Any] = {}
    for pattern, settings in if_absent.items():
        if not any(matches(pattern, name) for name in names):
            changes |= settings
    return changes


def architectures(config: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """Returns the names of Hugging Face classes in a ``config.json``."""
    content = {"architectures": config.get("architectures") or []}
    return Fields(content, str(where)).texts("architectures")


def call_with_path(where: Path, read: Callable[[Any], Any], values: Any) -> Any:
    """Returns ``read(values)``; a ValueError becomes a `CheckpointError` that names ``where``."""
    try:
        return read(values)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
