"""MANIFEST.json, the last file of a save. It makes a directory a checkpoint."""

import json
import math
import reprlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_ckpt.dtypes import item_size
from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError
from megatron_ckpt.json_input import Fields, parse_object
from megatron_ckpt.paths import check_name
from megatron_ckpt.store.blocks import ALGORITHM, BLOCK_SIZE, FileRecord, digest
from megatron_ckpt.views import MOST_CUT_DIMS, Box, cut_dims, tiles

MANIFEST = "MANIFEST.json"
FORMAT = "megatron-ckpt"
FORMAT_VERSION = 1
_FIRST_KIND = "gpt"  # the only kind when records did not have one
_NO_DIGEST = "0" * 32
_CORRUPT = CorruptCheckpointError
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and the start of its bytes in a file (row-major, little-endian)."""

    file: str
    start: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box of the global tensor."""
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor: safetensors dtype, shape, group (``model`` or ``optim``), and pieces."""

    dtype: str
    shape: tuple[int, ...]
    group: str
    pieces: tuple[Piece, ...]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return item_size(self.dtype)


@dataclass(frozen=True)
class ModelRecord:
    """The description of a model in a checkpoint, from which it can be built.

    Attributes:
        kind: The kind of the model, such as ``gpt``.
        family: The name in the entry-point group ``megatron.families``; None without a family.
        version: The version of the configuration, defined by the kind; 0 if it was not written.
        config: The model configuration as plain JSON values.
    """

    kind: str
    family: str | None
    version: int
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json. It has no times or random names: equal states, equal bytes."""

    iteration: int
    world_size: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    model: ModelRecord | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest in the file, which covers every file and is equal for equal states."""
        return digest(self._blank())

    def to_bytes(self) -> bytes:
        """Serialises the manifest, with a digest over its own bytes."""
        data = self._blank()
        return data.replace(_NO_DIGEST.encode(), digest(data).encode(), 1)

    def _blank(self) -> bytes:
        """Returns the bytes of the file with zeros for the digest."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "digest": _NO_DIGEST,
            "algorithm": ALGORITHM,
            "block_size": BLOCK_SIZE,
            "iteration": self.iteration,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            "model": asdict(self.model) if self.model else None,
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
            "tensors": {name: asdict(self.tensors[name]) for name in sorted(self.tensors)},
        }
        return (json.dumps(content, ensure_ascii=False, allow_nan=False, indent=0) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> "Manifest":
        """Parses and checks a manifest; ``where`` is the path for messages.

        Every name, number and list is checked against the others. A read through a manifest
        therefore cannot leave the folder or exceed a file.

        Raises:
            CorruptCheckpointError: The manifest is damaged or has content that no save writes.
            CheckpointError: A file name is unsafe, or the format has another version.
        """
        top = Fields(parse_object(data, where, CorruptCheckpointError), str(where), _CORRUPT)
        stored_digest = top.text("digest").encode(errors="replace")
        if stored_digest.decode() != digest(data.replace(stored_digest, _NO_DIGEST.encode(), 1)):
            raise CorruptCheckpointError(f"{where} changed since it was written (digest differs)")
        _check_format(top)
        files = {
            check_name(name, f"{where}: files"): _file(record)
            for name, record in top.items("files")
        }
        tensors = {name: _tensor(record, files) for name, record in top.items("tensors")}
        _check_shared_bytes(str(where), files, tensors)
        manifest = cls(
            iteration=top.integer("iteration"),
            world_size=top.integer("world_size", 1),
            files=files,
            tensors=tensors,
            model=None if top.require("model") is None else _model(top.inner("model")),
            versions={name: str(value) for name, value in top.inner("versions").content.items()},
        )
        try:
            manifest._blank()
        except (ValueError, RecursionError):
            raise CorruptCheckpointError(
                f"{where} is damaged: it has NaN or an unpaired surrogate, or is nested too deeply"
            ) from None
        return manifest


def _check_format(top: Fields) -> None:
    name, number = top.require("format"), top.require("format_version")
    if (name, number) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{top.where} has format {_short(name)} {_short(number)}, but this megatron-ckpt "
            f"reads {FORMAT} {FORMAT_VERSION}; use a newer version"
        )
    algorithm, size = top.require("algorithm"), top.require("block_size")
    if (algorithm, size) != (ALGORITHM, BLOCK_SIZE):
        raise CheckpointError(
            f"{top.where} has {_short(algorithm)} digests of {_short(size)}-byte blocks, but this "
            f"megatron-ckpt reads {ALGORITHM} of {BLOCK_SIZE} bytes; use a newer version"
        )


def _short(value: object) -> str:
    return value if isinstance(value, str) and len(value) < 40 else reprlib.repr(value)


def _file(record: Fields) -> FileRecord:
    size, blocks = record.integer("size"), record.texts("blocks")
    if len(blocks) != -(-size // BLOCK_SIZE):
        raise record.invalid("size", f"which is not {len(blocks)} blocks of {BLOCK_SIZE} bytes")
    return FileRecord(size, blocks)


def _model(record: Fields) -> ModelRecord:
    family = None if record.require("family") is None else record.text("family")
    kind = record.text("kind") if "kind" in record.content else _FIRST_KIND
    version = record.integer("version") if "version" in record.content else 0
    return ModelRecord(kind, family, version, record.inner("config").content)


def _tensor(record: Fields, files: Mapping[str, FileRecord]) -> TensorRecord:
    dtype, shape = record.dtype("dtype"), record.integers("shape")
    if math.prod(max(1, extent) for extent in shape) * item_size(dtype) > _MOST_BYTES:
        raise record.invalid("shape", "which is too large for a tensor")
    pieces = tuple(_piece(part, dtype, shape, files) for part in record.elements("pieces"))
    covered = sum(piece.box.numel for piece in pieces)
    if covered != math.prod(shape):
        raise record.invalid("shape", f"but its pieces have {covered} elements")
    boxes = [piece.box for piece in pieces]
    if len(cut := cut_dims(shape, boxes)) > MOST_CUT_DIMS:
        most = f"at most {MOST_CUT_DIMS} can be"
        raise record.invalid("shape", f"and is cut along {len(cut)} dims; {most}")
    if not tiles(shape, boxes):
        raise record.invalid("shape", "but two of its pieces overlap")
    return TensorRecord(dtype, shape, record.text("group"), pieces)


def _piece(
    part: Fields, dtype: str, shape: tuple[int, ...], files: Mapping[str, FileRecord]
) -> Piece:
    file, start = part.text("file"), part.integer("start")
    offsets, lengths = part.integers("offsets"), part.integers("lengths")
    if file not in files:
        raise part.invalid("file", "which is not in the list of files")
    if not len(offsets) == len(lengths) == len(shape):
        raise part.invalid("lengths", f"and offsets are {offsets}, for a tensor of shape {shape}")
    if any(o + n > extent for o, n, extent in zip(offsets, lengths, shape, strict=True)):
        raise part.invalid("lengths", f"from {offsets}, outside of shape {shape}")
    if start + math.prod(lengths) * item_size(dtype) > files[file].size:
        raise part.invalid("start", f"past the end of {file}, which has {files[file].size} bytes")
    return Piece(file, start, offsets, lengths)


def _check_shared_bytes(
    where: str, files: Mapping[str, FileRecord], tensors: Mapping[str, TensorRecord]
) -> None:
    """Refuses pieces that share bytes: a small file could declare any number of tensors."""
    used: dict[str, int] = defaultdict(int)
    for record in tensors.values():
        for piece in record.pieces:
            used[piece.file] += piece.box.numel * record.item_size
    for file, count in used.items():
        if count > files[file].size:
            raise CorruptCheckpointError(
                f"{where}: pieces take {count} bytes of {file}, which has {files[file].size}"
            )
