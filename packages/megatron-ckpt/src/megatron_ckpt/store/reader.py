"""Loading views of any layout from the pieces of a checkpoint of any other layout."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from megatron_ckpt.dtypes import dtype_name, is_floating, item_size, torch_dtype
from megatron_ckpt.errors import CheckpointError, adapter_hint, did_you_mean
from megatron_ckpt.store.blocks import BlockReader
from megatron_ckpt.store.manifest import Manifest, Piece, TensorRecord
from megatron_ckpt.views import Box, ViewLike, box_of, intersect

if TYPE_CHECKING:
    from torch import Tensor

#: ``refuse``: a view must have the stored dtype. ``floating``: floating-point dtypes are converted.
Cast = Literal["refuse", "floating"]

_READ_BYTES = 16 << 20  # most bytes of one read
_SEEK = 1 << 20  # bytes; longer rows are read one by one if only a part of each is needed


class _Copy(NamedTuple):
    piece: Piece
    dtype: str
    region: Box  # relative to the first element of the piece
    target: "Tensor"


class TensorInfo(Protocol):
    """The properties of a tensor that are known before it is read."""

    @property
    def dtype(self) -> str:
        """The name of the dtype in safetensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""

    @property
    def group(self) -> str:
        """``model`` or ``optim``."""


def check_names(
    stored: Mapping[str, TensorInfo],
    wanted: Mapping[str, Sequence[int]],
    groups: Sequence[str] | None,
) -> None:
    """Refuses names and shapes that differ between a checkpoint and the tensors to load.

    Args:
        stored: The tensors of the checkpoint.
        wanted: The global shapes by name, over all ranks.
        groups: The groups of the checkpoint whose tensors must all be wanted; None means all
            groups.
    """
    for name, shape in wanted.items():
        _check_shape(stored, name, shape)
    for name, record in stored.items():
        if name not in wanted and (groups is None or record.group in groups):
            why = did_you_mean(name, wanted) + "; load the same model, or choose the groups to load"
            raise CheckpointError(
                f"tensor {name!r} of the checkpoint ({record.group}) does not exist in the model"
                f"{adapter_hint(name, wanted) or why}"
            )


def _check_shape(stored: Mapping[str, TensorInfo], name: str, shape: Sequence[int]) -> None:
    if name not in stored:
        raise CheckpointError(
            f"the checkpoint has no tensor {name!r}{did_you_mean(name, stored)}; load a checkpoint "
            "of the same model"
        )
    stored_shape = stored[name].shape
    if tuple(shape) != stored_shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {stored_shape} in the checkpoint but {tuple(shape)} in the "
            "model"
        )


def check_views(
    stored: Mapping[str, TensorInfo], into: Mapping[str, Sequence[ViewLike]], cast: Cast
) -> None:
    """Checks the boxes and dtypes of all views before any of them is written to."""
    for name, views in into.items():
        for view in views:
            _check_shape(stored, name, view.global_shape)
            box_of(name, view)
            stored_dtype, dtype = stored[name].dtype, dtype_name(view.tensor.dtype)
            floating = is_floating(dtype) and is_floating(stored_dtype)
            if dtype != stored_dtype and not (cast == "floating" and floating):
                hint = "; load with cast='floating' to convert it" if floating else ""
                raise CheckpointError(
                    f"tensor {name!r} is stored as {stored_dtype}, but the model has {dtype}{hint}"
                )


def load_views(
    path: Path,
    manifest: Manifest,
    into: Mapping[str, Sequence[ViewLike]],
    *,
    verify: bool = True,
    progress: Callable[[int], object] = lambda count: None,
) -> None:
    """Copies stored elements into the tensors of the views, in place.

    Reads the byte ranges that the views need, file by file in ascending order. If ``verify``, it
    reads whole blocks and checks their digests first. After an error the content of the tensors is
    undefined.
    """
    by_file: dict[str, list[_Copy]] = defaultdict(list)
    for name, views in into.items():
        for view in views:
            for copy in _plan(manifest.tensors[name], view):
                by_file[copy.piece.file].append(copy)
    for file, copies in by_file.items():
        copies.sort(key=lambda copy: copy.piece.start)
        with BlockReader(path, file, manifest.files[file], verify=verify) as reader:
            for copy in copies:
                read_region(reader, copy.piece, copy.dtype, copy.region, copy.target)
                progress(copy.region.numel * item_size(copy.dtype))


def _plan(record: TensorRecord, view: ViewLike) -> list[_Copy]:
    box = Box(tuple(view.offsets), tuple(view.lengths))
    target = view.tensor.detach()
    copies = []
    for piece in record.pieces:
        common = intersect(box, piece.box)
        if common is None:
            continue
        origin = tuple(o - p for o, p in zip(common.offsets, piece.offsets, strict=True))
        region = Box(origin, common.lengths)
        copies.append(_Copy(piece, record.dtype, region, target[common.slices_in(box)]))
    return copies


def read_region(
    reader: BlockReader, piece: Piece, dtype: str, region: Box, target: "Tensor"
) -> None:
    """Copies ``region`` of a piece into ``target``, which has the shape of the region."""
    _read(reader, piece.start, dtype, piece.lengths, region, target)


def _read(
    reader: BlockReader,
    start: int,
    dtype: str,
    shape: tuple[int, ...],
    region: Box,
    target: "Tensor",
) -> None:
    import torch

    if not shape:
        shape, region, target = (1,), Box((0,), (1,)), target.reshape(1)
    row = math.prod(shape[1:]) * item_size(dtype)
    inner = Box(region.offsets[1:], region.lengths[1:])
    first, count = region.offsets[0], region.lengths[0]
    partly = inner.lengths != shape[1:]
    if len(shape) > 1 and (row > _READ_BYTES or (partly and row >= _SEEK)):
        for i in range(count):
            _read(reader, start + (first + i) * row, dtype, shape[1:], inner, target[i])
        return
    at = 0
    while at < count:
        begin = start + (first + at) * row
        rows = min(max(1, min(_READ_BYTES, reader.bytes_left_in_block(begin)) // row), count - at)
        data = reader.view(begin, rows * row)
        data_rows = torch.frombuffer(data, dtype=torch.uint8).view(torch_dtype(dtype))
        data_rows = data_rows.view(rows, *shape[1:])[
            (slice(None), *inner.slices_in(_origin(shape[1:])))
        ]
        target[at : at + rows].copy_(data_rows)
        at += rows


def _origin(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)
