"""Folders as Hugging Face's libraries write them: safetensors, maybe several, and JSON."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.dtypes import torch_dtype
from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER, ModelSource

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files that belong to a tokenizer; passed through unchanged.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)


def open_folder(folder: Path) -> ModelSource:
    """Return the model in a folder with ``config.json`` and safetensors."""
    kept = {f"{TOKENIZER}/{name}": folder / name for name in TOKENIZER_FILES}
    kept |= {f"{HUGGINGFACE}/{name}": folder / name for name in (CONFIG, GENERATION)}
    return ModelSource(
        where=folder / CONFIG,
        config=read_json(folder / CONFIG),
        open_tensors=lambda prefix: SafetensorsFolder(folder, prefix),
        files={name: path for name, path in kept.items() if path.is_file()},
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: give a folder of a Hugging Face model") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


class SafetensorsFolder(Mapping[str, "Tensor"]):
    """The tensors of a folder as a mapping that reads a tensor when asked.

    Args:
        folder: with ``model.safetensors`` or with ``model.safetensors.index.json`` and its files.
        prefix: put before every name if no name begins with it.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        from safetensors import SafetensorError, safe_open

        if (folder / INDEX).exists():
            files = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        elif (folder / WEIGHTS).exists():
            files = [WEIGHTS]
        else:
            raise CheckpointError(
                f"{folder} has neither {WEIGHTS} nor {INDEX}: save the model with safetensors"
            )
        self._handles: dict[str, tuple[Any, str]] = {}
        for file in files:
            try:
                handle: Any = safe_open(folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                self._handles[name] = (handle, name)
        if prefix and not any(name.startswith(prefix) for name in self._handles):
            self._handles = {prefix + name: entry for name, entry in self._handles.items()}

    def __getitem__(self, name: str) -> "Tensor":
        handle, stored = self._handles[name]
        tensor: Tensor = handle.get_tensor(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def meta(self) -> dict[str, "Tensor"]:
        """Return tensors of the same shapes and dtypes without content."""
        import torch

        slices = {name: h.get_slice(stored) for name, (h, stored) in self._handles.items()}
        return {
            name: torch.empty(part.get_shape(), dtype=torch_dtype(part.get_dtype()), device="meta")
            for name, part in slices.items()
        }
