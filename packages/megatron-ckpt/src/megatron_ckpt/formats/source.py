"""What an import reads from, whatever the format: a configuration, tensors, files to keep."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.views import Box

if TYPE_CHECKING:
    from torch import Tensor

#: Folders in a checkpoint for what is passed through.
TOKENIZER, HUGGINGFACE = "tokenizer", "huggingface"


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, each read when asked for."""

    def __getitem__(self, name: str) -> "Tensor":
        """Reads a tensor."""

    def box(self, name: str, box: Box) -> "Tensor":
        """Reads a box of a tensor."""

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""

    def meta(self) -> "dict[str, Tensor]":
        """Returns tensors of the same names, shapes and dtypes without content."""


@dataclass(frozen=True)
class ModelSource:
    """A model as an import sees it.

    Attributes:
        where: the file that the configuration comes from, for messages.
        config: content of a Hugging Face ``config.json``.
        open_tensors: opens the tensors; told the prefix that files of headless models leave out.
        files: what the checkpoint keeps, by its name there.
    """

    where: Path
    config: Mapping[str, Any]
    open_tensors: Callable[[str], TensorSource]
    files: Mapping[str, Path | bytes]
