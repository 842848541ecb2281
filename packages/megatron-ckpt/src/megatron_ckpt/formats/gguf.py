"""Import of GGUF, the file format of llama.cpp, as the Hugging Face model that it was made from.

A GGUF file holds metadata, tensors (most of them quantised in small blocks) and the tokenizer. This
module converts names, order of rows and settings to those of the published Hugging Face model, so
that the rows of a family describe one source only. The mapping depends on the architecture that the
file names; it consists of rows with the same operations that families use (`gguf_architectures`).
Tensors are read and dequantised on request.

Format: docs/gguf.md of ggml. The package ``gguf`` reads it and knows the quantisations.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.gguf_architectures.architecture import Architecture
from megatron_ckpt.formats.gguf_architectures.table import ARCHITECTURES
from megatron_ckpt.formats.gguf_file import GGUFFile
from megatron_ckpt.formats.gguf_generation import generation_config
from megatron_ckpt.formats.gguf_tokenizer import tokenizer_files
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER, ModelSource
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ckpt.ops.rows import Row

_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Returns whether a file starts with the magic number of GGUF."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open_gguf(path: Path, architectures: Mapping[str, Architecture] = ARCHITECTURES) -> ModelSource:
    """Returns the model in a GGUF file.

    Args:
        path: The path of the file.
        architectures: The supported architectures by name. Defaults to those of
            `gguf_architectures.table`.

    Raises:
        CheckpointError: The file is damaged, its architecture or one of its settings is not
            supported, or the package ``gguf`` is not installed.
    """
    file = GGUFFile(path)
    name = file.require("general.architecture")
    if name not in architectures:
        raise CheckpointError(
            f"{path} has the architecture {name!r}; supported architectures of GGUF files are "
            f"{', '.join(architectures)}; import the safetensors of the model"
        )
    architecture = architectures[name]
    config = architecture.config(file)
    return ModelSource(
        where=path,
        config=config,
        open_tensors=lambda prefix, former_endings: GGUFTensors(file, architecture, config),
        files={
            f"{HUGGINGFACE}/config.json": _json(config),
            f"{HUGGINGFACE}/generation_config.json": _json(generation_config(file)),
            **{f"{TOKENIZER}/{key}": content for key, content in tokenizer_files(file).items()},
        },
    )


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


class GGUFTensors:
    """The tensors of a GGUF file under their Hugging Face names, each converted on request."""

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
        converted = row.forward([self._file.read(theirs) for theirs in row.theirs])
        return converted[row.ours.index(name)]

    def box(self, name: str, box: Box) -> "Tensor":
        """Returns a box of a tensor. The whole tensor is dequantised."""
        whole = self[name]
        return whole[box.slices_in(Box((0,) * whole.ndim, tuple(whole.shape)))]

    def meta(self) -> "dict[str, Tensor]":
        """Returns the tensors on the meta device: shapes and dtypes without content."""
        return {
            name: row.forward([self._file.meta(theirs) for theirs in row.theirs])[
                row.ours.index(name)
            ]
            for name, row in self._rows.items()
        }
