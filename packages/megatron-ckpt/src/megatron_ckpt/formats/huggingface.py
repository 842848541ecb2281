"""Folders in the format of Hugging Face's libraries: safetensors files and JSON.

The origin of a folder is unknown, so its files are opened through `megatron_ckpt.paths`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.dtypes import torch_dtype
from megatron_ckpt.errors import CheckpointError, shorten
from megatron_ckpt.formats.quantized import QuantizedTensors, find_scheme, without_quantization
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER, ModelSource, TensorSource
from megatron_ckpt.json_input import Fields, parse_object
from megatron_ckpt.paths import check_name, locate, read_bytes
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_JSON = 100 << 20  # bytes, the limit of a safetensors header
#: Files of a tokenizer, which are copied unchanged.
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
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates/*.jinja"


def open_folder(folder: Path) -> ModelSource:
    """Returns the model in a folder with ``config.json`` and safetensors."""
    templates = [path.relative_to(folder).as_posix() for path in sorted(folder.glob(TEMPLATES))]
    attachments = {f"{TOKENIZER}/{name}": name for name in (*TOKENIZER_FILES, *templates)}
    attachments |= {f"{HUGGINGFACE}/{name}": name for name in (CONFIG, GENERATION)}
    config = _read_json(folder, CONFIG)
    scheme = find_scheme(config, str(folder / CONFIG))

    def open_tensors(prefix: str, former_endings: Mapping[str, str]) -> TensorSource:
        stored = SafetensorsFolder(folder, prefix, former_endings)
        return stored if scheme is None else QuantizedTensors(stored, scheme, _dtype_of(config))

    return ModelSource(
        where=folder / CONFIG,
        config=without_quantization(config, str(folder / CONFIG)),
        open_tensors=open_tensors,
        files={
            ours: locate(folder, name)
            for ours, name in attachments.items()
            if (folder / name).exists()
        },
    )


def _dtype_of(config: Mapping[str, Any]) -> "torch.dtype":
    """Returns the dtype that a ``config.json`` names, float32 or float16; else bfloat16."""
    import torch

    known = {"float32": torch.float32, "float16": torch.float16}
    name = config.get("dtype", config.get("torch_dtype"))
    return known.get(name, torch.bfloat16) if isinstance(name, str) else torch.bfloat16


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a folder."""
    try:
        return parse_object(read_bytes(folder, name, _LARGEST_JSON), folder / name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder / name} is missing; use a folder of a Hugging Face model"
        ) from None


def _files_of_index(folder: Path) -> set[str]:
    """Returns the names of the weight files in an index."""
    weight_map = Fields(_read_json(folder, INDEX), str(folder / INDEX)).inner("weight_map")
    return {check_name(name, weight_map.where) for name in weight_map.content.values()}


def _with_present_ending(name: str, former_endings: Mapping[str, str]) -> str:
    """Returns a name of a tensor with the present ending for a former one."""
    for former, present in former_endings.items():
        if name.endswith(former):
            return name.removesuffix(former) + present
    return name


class SafetensorsFolder(Mapping[str, "Tensor"]):
    """The tensors of a folder as a mapping that reads each tensor on request.

    Args:
        folder: The folder, with ``model.safetensors``, or with ``model.safetensors.index.json`` and
            the files that it names.
        prefix: A prefix that is added to every name if no name starts with it.
        former_endings: Endings of names in older files, and the present ones that replace them.
            Defaults to none.

    Raises:
        CheckpointError: There is no such file, a file cannot be read, or a tensor exists with its
            former and its present name.
    """

    def __init__(
        self, folder: Path, prefix: str = "", former_endings: Mapping[str, str] | None = None
    ) -> None:
        from safetensors import SafetensorError, safe_open

        if (folder / INDEX).exists():
            files = sorted(_files_of_index(folder))
        elif (folder / WEIGHTS).exists():
            files = [WEIGHTS]
        else:
            raise CheckpointError(
                f"{folder} has neither {WEIGHTS} nor {INDEX}; save the model with safetensors"
            )
        self._handles: dict[str, tuple[Any, str]] = {}
        for file in files:
            try:
                handle: Any = safe_open(locate(folder, file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{folder / file} cannot be read: {shorten(error)}"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                present = _with_present_ending(name, former_endings or {})
                if present in self._handles:
                    other = self._handles[present][1]
                    raise CheckpointError(
                        f"{folder} has {shorten(other)} and {shorten(name)}, two names of one "
                        "tensor; remove one"
                    )
                self._handles[present] = (handle, name)
        if prefix and not any(name.startswith(prefix) for name in self._handles):
            self._handles = {prefix + name: entry for name, entry in self._handles.items()}

    def __getitem__(self, name: str) -> "Tensor":
        handle, stored = self._handles[name]
        tensor: Tensor = handle.get_tensor(stored)
        return tensor

    def box(self, name: str, box: Box) -> "Tensor":
        """Reads a box of a tensor from its file."""
        handle, stored = self._handles[name]
        if not box.offsets:
            return self[name]
        inside = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
        tensor: Tensor = handle.get_slice(stored)[inside]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def meta(self) -> dict[str, "Tensor"]:
        """Returns the tensors on the meta device: shapes and dtypes without content."""
        import torch

        slices = {name: h.get_slice(stored) for name, (h, stored) in self._handles.items()}
        return {
            name: torch.empty(part.get_shape(), dtype=torch_dtype(part.get_dtype()), device="meta")
            for name, part in slices.items()
        }
