"""Streaming writer of safetensors files: the header, then one tensor after another."""

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
    """A tensor to write: its key, dtype and shape, and the function that produces it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    produce: "Callable[[], Tensor]"

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * item_size(self.dtype)


def header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Returns the header of a safetensors file and the start of each tensor in the file."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = [], 0
    for entry in entries:
        if entry.key in content or entry.key == "__metadata__":
            raise CheckpointError(f"a file cannot hold two tensors of the name {entry.key!r}")
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
    """Returns the elements of a tensor as bytes in row-major order; copies only if necessary."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return np.asarray(flat).data


def write_tensor_file(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> tuple[FileRecord, list[int]]:
    """Writes and syncs a safetensors file. Memory holds one tensor at a time.

    Args:
        path: The path of the file, which must not exist.
        entries: The tensors in the order of the file. For alignment, larger elements must come
            first.
        metadata: Strings for the metadata of the file.
        progress: Called with the bytes of each tensor written.

    Returns:
        Size and digests of the file, and the start of each tensor.
    """
    head, starts = header(entries, metadata or {"format": "pt"})
    with create_file(path) as descriptor:
        writer = BlockWriter(descriptor)
        writer.write(head)
        for entry in entries:
            tensor = entry.produce()
            if tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise CheckpointError(
                    f"tensor {entry.key!r} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, "
                    f"expected {entry.dtype} {entry.shape}"
                )
            writer.write(tensor_bytes(tensor))
            del tensor  # freed before the next tensor is produced
            progress(entry.nbytes)
    return writer.record(), starts
