"""The contract of an architecture of GGUF files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ckpt.formats.gguf_file import GGUFFile

if TYPE_CHECKING:
    from megatron_ckpt.ops.rows import RowData


@dataclass(frozen=True)
class Architecture:
    """The mapping from GGUF files of one architecture to a Hugging Face model.

    Attributes:
        rows: Returns the rows for a ``config.json``: Hugging Face names, GGUF names and the
            operations from GGUF to Hugging Face.
        config: Returns the content of ``config.json`` for a file.
        ignored: Names of tensors that no row uses, such as values that `config` reads.
    """

    rows: "Callable[[Mapping[str, Any]], list[RowData]]"
    config: Callable[[GGUFFile], dict[str, Any]]
    ignored: tuple[str, ...] = ()
