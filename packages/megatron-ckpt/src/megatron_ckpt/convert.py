"""Conversion of models between Hugging Face's format and checkpoints, tensor by tensor."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ckpt.coordinator import SingleProcessCoordinator
from megatron_ckpt.dtypes import DTYPES, dtype_name, is_floating, item_size
from megatron_ckpt.errors import CheckpointError, shorten
from megatron_ckpt.families import Family, find_compatible_family, find_family
from megatron_ckpt.foreign_model import ForeignModel, architectures, call_with_path
from megatron_ckpt.formats.huggingface import CONFIG, GENERATION
from megatron_ckpt.formats.notes import tokenizer_notes
from megatron_ckpt.formats.quantized import QUANTIZATION
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER
from megatron_ckpt.formats.special_tokens import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    special_token_ids,
)
from megatron_ckpt.formats.weight_files import EXPLICIT, INDEX, WEIGHTS
from megatron_ckpt.json_input import parse_object
from megatron_ckpt.ops.interpreter import check_source
from megatron_ckpt.ops.rows import Row, expand
from megatron_ckpt.paths import check_name
from megatron_ckpt.store.blocks import write_file
from megatron_ckpt.store.checkpoint import Checkpoint, CheckpointTensors
from megatron_ckpt.store.durable import create_folder
from megatron_ckpt.store.store import find_checkpoint, save_shards
from megatron_ckpt.store.tensorfile import TensorEntry, write_tensor_file
from megatron_ckpt.store.transaction import Transaction
from megatron_ckpt.store.writer import MODEL, Shard
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor


#: Suffixes of the files that transformers loads weights from.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class ConversionSize(NamedTuple):
    """The number of tensors and bytes that a conversion will write."""

    tensors: int
    nbytes: int


def _ignore(_: object) -> None:
    """Shows no progress."""


def import_hf(
    source: str | Path,
    directory: str | Path,
    *,
    family: str | None = None,
    dtype: "torch.dtype | None" = None,
    iteration: int = 0,
    on_start: Callable[[ConversionSize], object] = _ignore,
    on_note: Callable[[str], object] = _ignore,
    progress: Callable[[int], object] = _ignore,
) -> Path:
    """Imports a Hugging Face model, or a GGUF file of one, as a checkpoint.

    The checkpoint keeps the tokenizer files, ``config.json`` and ``generation_config.json``; for a
    GGUF file they are made from its metadata. Memory holds the tensors of one row of the family at
    a time.

    Args:
        source: A folder with ``config.json`` and safetensors, or a GGUF file (needs the extra
            ``gguf``). Quantised tensors become float32; `megatron_ckpt.formats.gguf` describes what
            is supported.
        directory: The directory of the `CheckpointStore` to save into.
        family: The name of the family. Defaults to the family that reads ``architectures``.
        dtype: The dtype of floating-point tensors. Defaults to the stored dtype of each tensor.
        iteration: The iteration to save as. Defaults to 0.
        on_start: Called with the number of tensors and bytes before anything is written.
        on_note: Called with a sentence for each file of the tokenizer that is not kept, for a
            tokenizer that transformers reads in another way, and for an index of missing files.
        progress: Called with the bytes of each tensor written.

    Returns:
        The directory of the checkpoint.

    Raises:
        CheckpointError: A family, configuration or tensor does not fit. Nothing is left behind.
    """
    model = ForeignModel(source, family=family)
    about_tokenizer = tokenizer_notes(model.path, model.files) if model.path.is_dir() else ()
    for note in (*model.notes, *about_tokenizer):
        on_note(note)
    shards, sizes = [], 0
    for name, tensor in model.tensors.items():
        stored, shape = tensor.dtype, tensor.shape
        if dtype is not None and is_floating(stored):
            stored = dtype_name(dtype)
        box = Box((0,) * len(shape), shape)
        sizes += box.numel * item_size(stored)

        def produce(name: str = name) -> "Tensor":
            return model.read_tensor(name, dtype)

        shards.append(Shard(name, MODEL, stored, shape, box, 0, produce))
    on_start(ConversionSize(len(shards), sizes))
    transaction = Transaction(
        Path(directory),
        iteration,
        model=model.model,
        files=model.files,
        retention=None,
        replace=False,
    )
    return save_shards(SingleProcessCoordinator(), transaction, lambda: (shards, {}), progress)


def export_hf(
    checkpoint: str | Path | Checkpoint,
    directory: str | Path,
    *,
    family: str | None = None,
    dtype: "torch.dtype | None" = None,
    max_shard_bytes: int = 5_000_000_000,
    on_start: Callable[[ConversionSize], object] = _ignore,
    progress: Callable[[int], object] = _ignore,
) -> Path:
    """Exports the model of a checkpoint as a folder that ``transformers`` loads.

    The folder gets its name when it is complete. Settings that the family does not know, such as
    token ids, are taken from the imported ``config.json`` if the checkpoint has one.

    Args:
        checkpoint: The directory of a checkpoint, the directory of a store (for its newest
            checkpoint), or an open checkpoint.
        directory: The folder to create. It must not exist or must be empty.
        family: The name of the family. Defaults to the family in the checkpoint, or to the only
            installed one that can express the model.
        dtype: The dtype of floating-point tensors. Defaults to the stored dtype of each tensor.
        max_shard_bytes: The approximate largest size of a weight file, in bytes. Defaults to 5 GB.
        on_start: Called with the number of tensors and bytes before anything is written.
        progress: Called with the bytes of each tensor written.

    Returns:
        The folder.

    Raises:
        CheckpointError: No family fits the checkpoint, or several do and the checkpoint names none.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else find_checkpoint(checkpoint)
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; use another folder")
    kind = family_of(opened, family)
    config = _config_of(opened, kind)
    settings = call_with_path(opened.path, kind.config_to_hf, config)
    tensors = CheckpointTensors(opened)
    rows = expand(kind.active_rows(config), config, len(tensors))
    check_source(rows, tensors, inverse=True)
    groups = [_Group(row, tensors, dtype) for row in rows]
    meta = tensors.meta()
    planned = [group.entries([meta[name] for name in group.row.ours]) for group in groups]
    # Larger elements come first, so that each tensor is aligned in its file.
    planned.sort(key=lambda entries: -item_size(entries[0].dtype))
    all_entries = [entry for entries in planned for entry in entries]
    on_start(ConversionSize(len(all_entries), sum(entry.nbytes for entry in all_entries)))
    with create_folder(target) as temporary:
        _write_weights(temporary, planned, max_shard_bytes, progress)
        _write_settings(temporary, opened, kind, settings, planned)
    return target


class _Group:
    """The foreign tensors of one row.

    All of them are computed when the first is requested, and each is released once it is returned.
    """

    def __init__(
        self, row: Row, source: Mapping[str, "Tensor"], dtype: "torch.dtype | None"
    ) -> None:
        self.row, self._source, self._dtype = row, source, dtype
        self._converted: dict[int, Tensor] = {}

    def entries(self, meta: "Sequence[Tensor]") -> list[TensorEntry]:
        """Returns an entry for each foreign tensor.

        Args:
            meta: Our tensors of the row, on the meta device.
        """
        shapes = [_cast(tensor, self._dtype) for tensor in self.row.inverse(meta)]
        return [
            TensorEntry(name, dtype_name(t.dtype), tuple(t.shape), partial(self._take, i))
            for i, (name, t) in enumerate(zip(self.row.theirs, shapes, strict=True))
        ]

    def _take(self, index: int) -> "Tensor":
        if not self._converted:
            converted = self.row.inverse([self._source[name] for name in self.row.ours])
            self._converted = dict(enumerate(converted))
        return _cast(self._converted.pop(index), self._dtype)


def _write_weights(
    folder: Path,
    groups: Sequence[Sequence[TensorEntry]],
    max_shard_bytes: int,
    progress: Callable[[int], object],
) -> None:
    shards: list[list[TensorEntry]] = [[]]
    filled = 0
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(group)
        filled += size
    if len(shards) == 1:
        write_tensor_file(folder / WEIGHTS, shards[0], progress=progress)
        return
    weight_map: dict[str, str] = {}
    for at, entries in enumerate(shards, 1):
        file = f"model-{at:05d}-of-{len(shards):05d}.safetensors"
        write_tensor_file(folder / file, entries, progress=progress)
        weight_map |= {entry.key: file for entry in entries}
    total = sum(entry.nbytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX, index)


def _write_settings(
    folder: Path,
    checkpoint: Checkpoint,
    family: Family,
    ours: Mapping[str, Any],
    groups: Sequence[Sequence[TensorEntry]],
) -> None:
    theirs: dict[str, Any] = {}
    original = f"{HUGGINGFACE}/{CONFIG}"
    if original in checkpoint.manifest.files:
        where = checkpoint.path / original
        theirs = parse_object(checkpoint.read_file(original), where)
        if not set(architectures(theirs, where)) & set(family.architectures):
            theirs = {}
    dtypes = [entry.dtype for group in groups for entry in group]
    theirs.pop("dtype", None)
    theirs.pop(QUANTIZATION, None)  # the exported tensors are not quantized
    theirs.pop(EXPLICIT, None)  # the exported files have the usual names
    stored = {"torch_dtype": DTYPES[max(set(dtypes), key=dtypes.count)][0]}
    if not theirs:  # trained here: the ids of special tokens come from the tokenizer
        theirs = dict(special_token_ids(_tokenizer_files(checkpoint)))
        numbers = {name: number for name, number in theirs.items() if number is not None}
        _write_json(folder / GENERATION, numbers)
    _write_json(folder / CONFIG, theirs | dict(ours) | stored)
    for name in checkpoint.manifest.files:
        folder_name, _, file = name.partition("/")
        if (folder_name == TOKENIZER and file) or name == f"{HUGGINGFACE}/{GENERATION}":
            path = folder / check_name(file, f"{checkpoint.path}: {TOKENIZER}")
            if path.exists() or file == INDEX or file.endswith(_WEIGHTS):
                raise CheckpointError(
                    f"{checkpoint.path} cannot be exported: its file {name!r} has the name of "
                    "another file of the exported model"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, checkpoint.read_file(name))


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    names = {file: f"{TOKENIZER}/{file}" for file in (TOKENIZER_FILE, TOKENIZER_CONFIG)}
    available = checkpoint.manifest.files
    return {file: checkpoint.read_file(name) for file, name in names.items() if name in available}


def family_of(checkpoint: Checkpoint, name: str | None = None) -> Family:
    """Returns the family that a checkpoint is exported as.

    Args:
        checkpoint: The checkpoint.
        name: The name of the family. Defaults to the family in the checkpoint, or to the only
            installed one that can express its model.

    Raises:
        CheckpointError: The checkpoint has no model record, or no family fits.
    """
    record = checkpoint.model
    if record is None:
        raise CheckpointError(
            f"{checkpoint.path} cannot be exported: it has no record of its model"
        )
    name = name or record.family
    if name is None:
        return call_with_path(checkpoint.path, find_compatible_family, record)  # type: ignore[no-any-return]
    family = find_family(name)
    if family.kind != record.kind:
        raise CheckpointError(
            f"{checkpoint.path} holds a model of kind {shorten(repr(record.kind))}, but family "
            f"{name!r} describes models of kind {family.kind!r}; choose another --family"
        )
    return family


def _config_of(checkpoint: Checkpoint, family: Family) -> Any:
    record = checkpoint.model
    if record is None:
        raise CheckpointError(f"{checkpoint.path} has no record of its model")
    return call_with_path(
        checkpoint.path,
        lambda fields: family.config_from_record(fields, record.version),
        record.config,
    )


def _cast(tensor: "Tensor", dtype: "torch.dtype | None") -> "Tensor":
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode(errors="backslashreplace"))  # \ud800, as JSON escapes it
