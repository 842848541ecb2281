"""The four steps of a save: describe the shards of each rank, check them, write and commit.

`describe_shards` and `write_shards` run on every rank, `check_contributions` and `commit` on rank
0.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_ckpt._version import __version__
from megatron_ckpt.dtypes import dtype_name, item_size
from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.paths import check_name, locate
from megatron_ckpt.store.blocks import FileRecord, copy_file, write_file
from megatron_ckpt.store.checkpoint import STATE
from megatron_ckpt.store.durable import sync_directory, sync_tree
from megatron_ckpt.store.manifest import MANIFEST, Manifest, ModelRecord, Piece, TensorRecord
from megatron_ckpt.store.tensorfile import TensorEntry, write_tensor_file
from megatron_ckpt.values import dumps
from megatron_ckpt.views import Box, ViewLike, box_of, check_tiling

if TYPE_CHECKING:
    from torch import Tensor

MODEL, OPTIM = "model", "optim"
_RESERVED = (MANIFEST, STATE)


@dataclass(frozen=True)
class Shard:
    """A box of a global tensor on this rank, and the function that produces its elements."""

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    replica: int
    produce: "Callable[[], Tensor]"

    @property
    def key(self) -> str:
        """The name in the safetensors file: the tensor's name, plus the box of a sharded tensor."""
        whole = self.box.lengths == self.shape
        return self.name if whole else f"{self.name}{self.box}"


@dataclass(frozen=True)
class Contribution:
    """The metadata that one rank contributes to a save; it is small and sent to rank 0.

    Attributes:
        tensors: name -> (group, dtype, global shape, [(replica, offsets, lengths)]).
        values: name -> plain value as JSON text.
    """

    tensors: dict[str, tuple[str, str, tuple[int, ...], list[tuple[int, Box]]]]
    values: dict[str, str]

    def to_plain(self) -> dict[str, Any]:
        """Returns the contribution as plain values; see `from_plain`."""
        return {"tensors": self.tensors, "values": self.values}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reverses `to_plain`, also after a round trip through JSON."""
        tensors = {
            name: (group, dtype, shape, [(replica, Box(*box)) for replica, box in boxes])
            for name, (group, dtype, shape, boxes) in plain["tensors"].items()
        }
        return cls(tensors, plain["values"])


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank wrote, and the pieces of each tensor in them."""

    files: dict[str, FileRecord]
    pieces: list[tuple[str, Piece]]

    def to_plain(self) -> dict[str, Any]:
        """Returns the files and pieces as plain values; see `from_plain`."""
        files = {name: (record.size, record.blocks) for name, record in self.files.items()}
        return {"files": files, "pieces": [(name, astuple(piece)) for name, piece in self.pieces]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Reverses `to_plain`, also after a round trip through JSON."""
        files = {name: FileRecord(*record) for name, record in plain["files"].items()}
        return cls(files, [(name, Piece(*piece)) for name, piece in plain["pieces"]])


def split_state(state: Mapping[str, object]) -> tuple[list[Shard], dict[str, str]]:
    """Splits a state into the shards of its views and its plain values as JSON text.

    A tensor belongs to the group ``optim`` if its name is another tensor's name with a suffix
    (``layers.0.mlp.up.weight.exp_avg``), else to ``model``.
    """
    views: dict[str, Sequence[ViewLike]] = {}
    values: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, list) and value and all(hasattr(v, "global_shape") for v in value):
            views[name] = value
        else:
            values[name] = _value_text(name, value)
    shards = []
    for name, held in views.items():
        group = OPTIM if _extends_another(name, views) else MODEL
        for view in held:
            shards.append(_shard(name, group, view))
    return shards, values


def _value_text(name: str, value: object) -> str:
    """Returns a plain value as JSON text; refuses text that a file in UTF-8 cannot hold."""
    text = dumps(value, name)
    try:
        f"{name}{text}".encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"state {name!a} has an unpaired surrogate, as in a path that is not UTF-8; leave "
            "it out or store it as bytes"
        ) from None
    return text


def _shard(name: str, group: str, view: ViewLike) -> Shard:
    box, tensor = box_of(name, view), view.tensor
    dtype = dtype_name(tensor.dtype)
    return Shard(name, group, dtype, tuple(view.global_shape), box, view.replica, lambda: tensor)


def _extends_another(name: str, names: Mapping[str, object]) -> bool:
    return any(name[:at] in names for at, mark in enumerate(name) if mark in ".:/@#")


def describe_shards(shards: Iterable[Shard], values: dict[str, str]) -> Contribution:
    """Returns the metadata of the shards of this rank."""
    tensors: dict[str, tuple[str, str, tuple[int, ...], list[tuple[int, Box]]]] = {}
    for shard in shards:
        record = tensors.setdefault(shard.name, (shard.group, shard.dtype, shard.shape, []))
        if record[:3] != (shard.group, shard.dtype, shard.shape):
            raise CheckpointError(
                f"tensor {shard.name!r}: views on one rank differ: {record[1]} {record[2]} and "
                f"{shard.dtype} {shard.shape}"
            )
        record[3].append((shard.replica, shard.box))
    return Contribution(tensors, values)


def check_contributions(ranks: Sequence[Contribution]) -> dict[str, str]:
    """Checks that all ranks together hold each tensor once, and returns the plain values.

    Raises:
        CheckpointError: Ranks disagree, or boxes overlap or leave a gap; names the tensor.
    """
    first: dict[str, tuple[int, tuple[str, str, tuple[int, ...]]]] = {}
    owners: dict[str, list[tuple[int, int, Box]]] = defaultdict(list)
    values: dict[str, tuple[int, str]] = {}
    for rank, contribution in enumerate(ranks):
        for name, (group, dtype, shape, boxes) in contribution.tensors.items():
            facts = (group, dtype, shape)
            other, known = first.setdefault(name, (rank, facts))
            if known != facts:
                raise CheckpointError(
                    f"tensor {name!r} is {' '.join(map(str, known))} on rank {other} and "
                    f"{' '.join(map(str, facts))} on rank {rank}"
                )
            owners[name].extend((rank, replica, box) for replica, box in boxes)
        for name, text in contribution.values.items():
            other, known_text = values.setdefault(name, (rank, text))
            if known_text != text:
                raise CheckpointError(
                    f"value {name!r} differs between ranks {other} and {rank}; use a different "
                    "name on each rank"
                )
    for name, (_, (_, _, shape)) in first.items():
        check_tiling(name, shape, owners[name])
    for name in [name for name, (_, text) in values.items() if name in first and text == "[]"]:
        del values[name]  # a rank whose shard is all padding has no view of the tensor
    if both := values.keys() & first.keys():
        raise CheckpointError(f"{min(both)!r} is a tensor on one rank and a value on another")
    return {name: text for name, (_, text) in values.items()}


def write_shards(
    directory: Path,
    shards: Iterable[Shard],
    rank: int,
    world_size: int,
    progress: Callable[[int], object] = lambda count: None,
) -> RankFiles:
    """Writes and syncs the shards of replica 0 on this rank, one file for each group."""
    by_group: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        # Empty boxes are skipped, unless the whole tensor is empty.
        if shard.replica == 0 and (shard.box.numel or not math.prod(shard.shape)):
            by_group[shard.group].append(shard)
    files, pieces = {}, []
    for group, held in sorted(by_group.items()):
        file = f"{group}-{rank:05d}-of-{world_size:05d}.safetensors"
        held.sort(key=lambda shard: (-item_size(shard.dtype), shard.name, shard.box))
        entries = [TensorEntry(s.key, s.dtype, s.box.lengths, s.produce) for s in held]
        try:
            files[file], starts = write_tensor_file(directory / file, entries, progress=progress)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{directory} does not exist on rank {rank}; use a directory that all ranks share"
            ) from error
        for shard, start in zip(held, starts, strict=True):
            pieces.append((shard.name, Piece(file, start, shard.box.offsets, shard.box.lengths)))
    sync_directory(directory)
    return RankFiles(files, pieces)


def commit(
    directory: Path,
    iteration: int,
    contributions: Sequence[Contribution],
    written: Sequence[RankFiles],
    values: Mapping[str, str],
    model: ModelRecord | None,
    attachments: Mapping[str, bytes | Path],
) -> Manifest:
    """Writes the values, the attachments and finally the manifest, and syncs all of them."""
    content = ",\n".join(f"{dumps(name, name)}: {text}" for name, text in sorted(values.items()))
    files = {STATE: write_file(directory / STATE, f"{{\n{content}\n}}\n".encode())}
    for name, source in expand_attachments(attachments).items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            files[name] = write_file(target, source)
        else:
            files[name] = copy_file(source, target)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for rank in written:
        files |= rank.files
        for name, piece in rank.pieces:
            pieces[name].append(piece)
    tensors = {
        name: TensorRecord(dtype, shape, group, tuple(sorted(pieces[name], key=lambda p: p.box)))
        for contribution in contributions
        for name, (group, dtype, shape, _) in contribution.tensors.items()
    }
    manifest = Manifest(iteration, len(written), files, tensors, model, _versions())
    sync_tree(directory)
    write_file(directory / MANIFEST, manifest.to_bytes())
    sync_directory(directory)
    return manifest


def expand_attachments(attachments: Mapping[str, bytes | Path]) -> dict[str, bytes | Path]:
    """Replaces folders by their files and checks the resulting names.

    Raises:
        CheckpointError: A name is unsafe (`megatron_ckpt.paths`) or reserved, or a link leads out
            of a folder.
    """
    found: dict[str, bytes | Path] = {}
    for name, source in attachments.items():
        if isinstance(source, Path) and source.is_dir():
            below = sorted(path for path in source.rglob("*") if path.is_file())
            names = [path.relative_to(source).as_posix() for path in below]
            found |= {f"{name}/{inside}": locate(source, inside) for inside in names}
        else:
            found[name] = source
    for name in found:
        check_name(name, "files of a checkpoint")
        if name in _RESERVED or ("/" not in name and name.endswith(".safetensors")):
            raise CheckpointError(
                f"a checkpoint cannot hold a file {name!r}; use a name other than {STATE}, "
                f"{MANIFEST} and *.safetensors"
            )
    return found


def _versions() -> dict[str, str]:
    versions = {"megatron-ckpt": __version__}
    try:
        versions["torch"] = version("torch")
    except PackageNotFoundError:
        versions["torch"] = "unknown"
    return versions
