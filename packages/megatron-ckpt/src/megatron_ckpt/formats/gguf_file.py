"""A GGUF file: metadata by key and tensors by their GGUF names."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ckpt.errors import CheckpointError, shorten
from megatron_ckpt.formats.gguf_header import check_header

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: Element types that are not converted, by their GGUF names; all others become float32.
_PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFFile:
    """The metadata and raw tensors of a GGUF file, which stays mapped while the object exists."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise CheckpointError(
                f"{path}: GGUF files need the package gguf; pip install 'megatron-ckpt[gguf]'"
            ) from None
        self.path = path
        check_header(path)
        # The reader slices beyond the end of a truncated file, which fails in various ways.
        self._reader: Any = self._checked(lambda: GGUFReader(path))
        if self._reader.byte_order != "I":
            raise CheckpointError(f"{path} does not have the byte order of this machine")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.get("split.count", 0) > 1:
            raise CheckpointError(
                f"{path} is one of {self.get('split.count')} parts; join them with "
                "llama-gguf-split --merge of llama.cpp"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a metadata key, or ``default`` if the file does not have it."""
        if key not in self._reader.fields:
            return default
        return self._checked(self._reader.fields[key].contents)

    def require(self, key: str) -> Any:
        """Returns the value of a metadata key.

        Raises:
            CheckpointError: The file does not have the key.
        """
        if key not in self._reader.fields:
            raise CheckpointError(f"{self.path} has no metadata {key!r}: the model is incomplete")
        return self.get(key)

    def listed(self, key: str, kind: type[T]) -> list[T]:
        """Returns the value of a key that has to be a list of one type, such as ``str``.

        Raises:
            CheckpointError: The file does not have the key, or its value is another one.
        """
        value = self.require(key)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise CheckpointError(f"{self.path}: {key} is not a list of {kind.__name__} values")
        return value

    def keys(self) -> Iterator[str]:
        """Yields the metadata keys."""
        yield from self._reader.fields

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return tuple(self._tensors)

    def meta(self, name: str) -> "Tensor":
        """Returns a tensor on the meta device with the shape and dtype that `read` returns."""
        import torch

        raw = self._tensors[name]
        shape = [int(extent) for extent in reversed(raw.shape)]
        return torch.empty(shape, dtype=_torch_dtype(raw), device="meta")

    def read(self, name: str) -> "Tensor":
        """Reads a tensor; quantised tensors become float32."""
        import numpy as np
        import torch
        from gguf import dequantize

        raw = self._tensors[name]
        kind = raw.tensor_type.name
        if kind in _PLAIN:
            # A copy does not refer to the mapped file. bfloat16 is returned as bytes.
            return torch.from_numpy(np.array(raw.data)).view(_torch_dtype(raw))
        try:
            return torch.from_numpy(np.asarray(dequantize(raw.data, raw.tensor_type)))
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {kind}, which the package gguf cannot "
                "dequantise; import the safetensors of the model"
            ) from None

    def _checked(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path} is damaged or not a GGUF file of version 2 or 3: {shorten(error)}"
            ) from error


def _torch_dtype(raw: Any) -> Any:
    import torch

    return getattr(torch, _PLAIN.get(raw.tensor_type.name, "float32"))
