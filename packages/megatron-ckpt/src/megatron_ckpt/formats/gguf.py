"""GGUF, the file format of llama.cpp, read as the Hugging Face model it was made of.

A GGUF file holds metadata, tensors (most of them quantised in small blocks) and the tokenizer. Here
its names, row order and settings become those of the published model, so that the rows of a family
have one source to describe. How follows from the architecture that the file names: rows of the same
operations that families use. Tensors are read and dequantised when asked for.

Format: docs/gguf.md of ggml. The package ``gguf`` reads it and knows the quantisations.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.gguf_architectures.architecture import Architecture
from megatron_ckpt.formats.gguf_architectures.table import ARCHITECTURES
from megatron_ckpt.formats.gguf_file import GGUFFile
from megatron_ckpt.formats.gguf_tokenizer import tokenizer_files
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER, ModelSource
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ckpt.ops.rows import Row

_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Returns whether a file begins as GGUF files do."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open_gguf(path: Path, architectures: Mapping[str, Architecture] = ARCHITECTURES) -> ModelSource:
    """Returns the model in a GGUF file.

    Args:
        path: The file.
        architectures: The supported architectures by name. Defaults to those of
            `megatron_ckpt.formats.gguf_architectures.table`.

    Raises:
        CheckpointError: The file is damaged, its architecture or a setting is not supported, or
            the package ``gguf`` is not installed.
    """
    import json

    file = GGUFFile(path)
    name = file.require("general.architecture")
    if name not in architectures:
        raise CheckpointError(
            f"{path} holds a model of architecture {name!r}; supported architectures of GGUF files "
            f"are {', '.join(architectures)}: import its safetensors"
        )
    architecture = architectures[name]
    config = architecture.config(file)
    return ModelSource(
        where=path,
        config=config,
        open_tensors=lambda prefix: GGUFTensors(file, architecture, config),
        files={
            f"{HUGGINGFACE}/config.json": (json.dumps(config, indent=2) + "\n").encode(),
            **{f"{TOKENIZER}/{key}": content for key, content in tokenizer_files(file).items()},
        },
    )


class GGUFTensors:
    """The tensors of a file under their Hugging Face names, each made when asked for."""

    def __init__(
        self, file: GGUFFile, architecture: Architecture, config: Mapping[str, Any]
    ) -> None:
        from megatron_ckpt.ops.interpreter import check_source
        from megatron_ckpt.ops.rows import expand

        layered = {**config, "num_layers": config["num_hidden_layers"]}
        try:
            rows = expand(architecture.rows(config), layered, max_tensors=len(file.tensor_names))
            check_source(rows, file.tensor_names, ignored=architecture.ignored)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from None
        self._file = file
        self._rows: dict[str, Row] = {name: row for row in rows for name in row.ours}

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __getitem__(self, name: str) -> "Tensor":
        row = self._rows[name]
        made = row.forward([self._file.read(theirs) for theirs in row.theirs])
        return made[row.ours.index(name)]

    def box(self, name: str, box: Box) -> "Tensor":
        """Returns a box of a tensor, which is dequantised as a whole."""
        whole = self[name]
        return whole[box.slices_in(Box((0,) * whole.ndim, tuple(whole.shape)))]

    def meta(self) -> "dict[str, Tensor]":
        """Returns tensors of the same shapes and dtypes without content."""
        return {
            name: row.forward([self._file.meta(theirs) for theirs in row.theirs])[
                row.ours.index(name)
            ]
            for name, row in self._rows.items()
        }
