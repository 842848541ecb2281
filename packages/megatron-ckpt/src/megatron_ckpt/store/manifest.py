"""MANIFEST.json: written last, it makes a directory a checkpoint and says what must be in it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_ckpt.dtypes import item_size
from megatron_ckpt.errors import CheckpointError, CorruptCheckpointError
from megatron_ckpt.store.blocks import ALGORITHM, BLOCK_SIZE, FileRecord, digest
from megatron_ckpt.views import Box

MANIFEST = "MANIFEST.json"
FORMAT = "megatron-ckpt"
FORMAT_VERSION = 1
_NO_DIGEST = "0" * 32


@dataclass(frozen=True)
class Piece:
    """A box of a tensor and where its bytes begin (row-major, little-endian)."""

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
    """A global tensor: safetensors dtype, shape, ``model`` or ``optim``, and its pieces."""

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
    """The model a checkpoint holds, enough to build it again.

    Attributes:
        family: name in the entry-point group ``megatron.families``; None if it has no family.
        config: the model configuration as plain JSON values.
    """

    family: str | None
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json. Equal states give equal bytes: no times, no random names."""

    iteration: int
    world_size: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    model: ModelRecord | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The digest in the file: equal for equal states, since it covers every file's digests."""
        return digest(self._blank())

    def to_bytes(self) -> bytes:
        """Serialise, with a digest over the bytes themselves."""
        data = self._blank()
        return data.replace(_NO_DIGEST.encode(), digest(data).encode(), 1)

    def _blank(self) -> bytes:
        """Return the file's bytes with zeros for the digest."""
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
        """Parse and check; ``where`` names the file in errors."""
        try:
            content = json.loads(data)
            written = content["digest"]
            blank = data.replace(written.encode(), _NO_DIGEST.encode(), 1)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{where} is not a manifest: {error}") from error
        if written != digest(blank):
            raise CorruptCheckpointError(f"{where} changed since it was written (digest differs)")
        if content["format"] != FORMAT or content["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format {content['format']} {content['format_version']}, this "
                f"megatron-ckpt reads {FORMAT} {FORMAT_VERSION}: use a newer one"
            )
        if content["algorithm"] != ALGORITHM or content["block_size"] != BLOCK_SIZE:
            raise CheckpointError(
                f"{where} digests {content['block_size']}-byte blocks with {content['algorithm']}, "
                f"this megatron-ckpt {BLOCK_SIZE}-byte blocks with {ALGORITHM}: use a newer one"
            )
        return cls(
            iteration=content["iteration"],
            world_size=content["world_size"],
            files={
                name: FileRecord(record["size"], tuple(record["blocks"]))
                for name, record in content["files"].items()
            },
            tensors={name: _tensor(record) for name, record in content["tensors"].items()},
            model=ModelRecord(**content["model"]) if content["model"] else None,
            versions=content["versions"],
        )


def _tensor(record: dict[str, Any]) -> TensorRecord:
    pieces = (
        Piece(piece["file"], piece["start"], tuple(piece["offsets"]), tuple(piece["lengths"]))
        for piece in record["pieces"]
    )
    return TensorRecord(record["dtype"], tuple(record["shape"]), record["group"], tuple(pieces))
