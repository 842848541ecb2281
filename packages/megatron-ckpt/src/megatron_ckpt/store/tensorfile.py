"""Writing safetensors files as a stream: the header first, then one tensor after another."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_ckpt.dtypes import dtype_name, item_size
from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.store.blocks import BlockWriter, FileRecord
from megatron_ckpt.store.durable import create_file

if TYPE_CHECKING:
    from torch import Tensor


class TensorEntry(NamedTuple):
    """A tensor to be written: its key, what it will be, and how to get it when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    produce: "Callable[[], Tensor]"

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * item_size(self.dtype)


def header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file and where each tensor begins, counted in the file."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = [], 0
    for entry in entries:
        if entry.key in content or entry.key == "__metadata__":
            raise CheckpointError(f"tensor {entry.key!r} is written twice to one file")
        content[entry.key] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        starts.append(at)
        at += entry.nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [begin + start for start in starts]


def tensor_bytes(tensor: "Tensor") -> memoryview:
    """Returns the elements of a tensor in row-major order as bytes; copies only where it must."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return np.asarray(flat).data


def write_tensor_file(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> tuple[FileRecord, list[int]]:
    """Writes a safetensors file, synced; one tensor is held at a time.

    Args:
        path: of the file, which may not exist.
        entries: the tensors in the order of the file; to keep each aligned, larger elements first.
        metadata: strings for the file's own metadata.
        progress: called with the bytes of each tensor written.

    Returns:
        Size and digests, and where each tensor begins.
    """
    head, starts = header(entries, metadata or {"format": "pt"})
    with create_file(path) as descriptor:
        writer = BlockWriter(descriptor)
        writer.write(head)
        for entry in entries:
            tensor = entry.produce()
            if tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise CheckpointError(
                    f"tensor {entry.key!r} became {dtype_name(tensor.dtype)} "
                    f"{tuple(tensor.shape)}, planned was {entry.dtype} {entry.shape}"
                )
            writer.write(tensor_bytes(tensor))
            del tensor  # or it would still be there while the next is made
            progress(entry.nbytes)
    return writer.record(), starts
