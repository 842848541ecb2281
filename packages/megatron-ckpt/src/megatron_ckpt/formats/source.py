"""The source of an import in any format: a configuration, tensors, and files to keep."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.views import Box

if TYPE_CHECKING:
    from torch import Tensor

#: Folders in a checkpoint for files that are copied unchanged.
TOKENIZER, HUGGINGFACE = "tokenizer", "huggingface"


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, each read on request."""

    def __getitem__(self, name: str) -> "Tensor":
        """Reads a tensor."""

    def box(self, name: str, box: Box) -> "Tensor":
        """Reads a box of a tensor."""

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the tensors."""

    def meta(self) -> "dict[str, Tensor]":
        """Returns the tensors on the meta device: shapes and dtypes without content."""


@dataclass(frozen=True)
class ModelSource:
    """The source of an import.

    Attributes:
        where: The file that the configuration comes from, for messages.
        config: The content of a Hugging Face ``config.json``.
        open_tensors: Opens the tensors. Its arguments are the prefix that files of headless models
            leave out, and the present ones for endings of names in older files.
        files: The files that the checkpoint keeps, by their names there.
        notes: Returns sentences about files of weights that are not read. Defaults to none.
    """

    where: Path
    config: Mapping[str, Any]
    open_tensors: Callable[[str, Mapping[str, str]], TensorSource]
    files: Mapping[str, Path | bytes]
    notes: Callable[[], tuple[str, ...]] = tuple
