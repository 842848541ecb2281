"""Folders in the format of Hugging Face's libraries: safetensors files and JSON.

The origin of a folder is unknown, so its files are opened through `megatron_ckpt.paths`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ckpt.dtypes import DTYPES, torch_dtype
from megatron_ckpt.errors import CheckpointError, shorten
from megatron_ckpt.formats.quantized import (
    QUANTIZATION,
    QuantizedTensors,
    find_scheme,
    without_quantization,
)
from megatron_ckpt.formats.source import HUGGINGFACE, TOKENIZER, ModelSource, TensorSource
from megatron_ckpt.formats.weight_files import (
    EXPLICIT,
    find_weight_files,
    open_tensors,
    read_json,
    tensors_equal,
)
from megatron_ckpt.paths import locate
from megatron_ckpt.views import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG, GENERATION = "config.json", "generation_config.json"
_PACKED = {"F4": "float4_e2m1fn_x2"}
"""safetensors dtypes with two elements a byte, and the torch dtypes whose elements are bytes."""
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
    config = read_json(folder, CONFIG)
    scheme = find_scheme(config, str(folder / CONFIG))
    find_files = cache(partial(find_weight_files, folder, config))

    def open_all(prefix: str, former_endings: Mapping[str, str]) -> TensorSource:
        stored = SafetensorsFolder(folder, find_files().names, prefix, former_endings)
        if scheme is None and (packed := [name for name in stored if stored.is_packed(name)]):
            raise CheckpointError(
                f"{folder}: tensor {shorten(repr(packed[0]))} is stored in four bits, but "
                f"{CONFIG} has no {QUANTIZATION} that is supported; save it in another dtype"
            )
        return stored if scheme is None else QuantizedTensors(stored, scheme, _dtype_of(config))

    return ModelSource(
        where=folder / CONFIG,
        config=without_quantization(
            {name: value for name, value in config.items() if name != EXPLICIT},
            str(folder / CONFIG),
        ),
        open_tensors=open_all,
        files={
            ours: locate(folder, name)
            for ours, name in attachments.items()
            if (folder / name).exists()
        },
        notes=lambda: (note,) if (note := find_files().note) else (),
    )


def _dtype_of(config: Mapping[str, Any]) -> "torch.dtype":
    """Returns the dtype that a ``config.json`` names, float32 or float16; else bfloat16."""
    import torch

    known = {"float32": torch.float32, "float16": torch.float16}
    name = config.get("dtype", config.get("torch_dtype"))
    return known.get(name, torch.bfloat16) if isinstance(name, str) else torch.bfloat16


def _with_present_ending(name: str, former_endings: Mapping[str, str]) -> str:
    """Returns a name of a tensor with the present ending for a former one."""
    for former, present in former_endings.items():
        if name.endswith(former):
            return name.removesuffix(former) + present
    return name


class SafetensorsFolder(Mapping[str, "Tensor"]):
    """The tensors of a folder as a mapping that reads each tensor on request.

    Tensors in ``F4`` are bytes of two elements, as torch reads them: their last dim is half of that
    in the file.

    Args:
        folder: The folder.
        files: Names of its safetensors files.
        prefix: A prefix that is added to every name if no name starts with it.
        former_endings: Endings of names in older files, and the present ones that replace them.
            Defaults to none.

    Raises:
        CheckpointError: A file cannot be read, two files hold different tensors of one name, or a
            tensor exists with its former and its present name.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        prefix: str = "",
        former_endings: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._handles: dict[str, tuple[Any, str]] = {}
        opened: dict[str, str] = {}
        for file in files:
            handle = open_tensors(folder, file)
            for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                present = _with_present_ending(name, former_endings or {})
                if present in self._handles:
                    first, other = self._handles[present]
                    if other == name and tensors_equal(first, handle, name):
                        continue
                    both = (
                        f"different tensors {shorten(name)} in {opened[present]} and {file}"
                        if other == name
                        else f"{shorten(other)} and {shorten(name)}, two names of one tensor"
                    )
                    raise CheckpointError(f"{folder} has {both}; remove one")
                self._handles[present] = (handle, name)
                opened[present] = file
        if prefix and not any(name.startswith(prefix) for name in self._handles):
            self._handles = {prefix + name: entry for name, entry in self._handles.items()}

    def __getitem__(self, name: str) -> "Tensor":
        import torch

        handle, stored = self._handles[name]
        tensor: Tensor = handle.get_tensor(stored)
        return tensor.view(torch.uint8) if self.is_packed(name) else tensor

    def box(self, name: str, box: Box) -> "Tensor":
        """Reads a box of a tensor from its file."""
        handle, stored = self._handles[name]
        if not box.offsets:
            return self[name]
        inside = tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
        if self.is_packed(name):  # safetensors 0.8.0 does not slice tensors of four bits
            return self[name][inside]
        tensor: Tensor = handle.get_slice(stored)[inside]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def meta(self) -> dict[str, "Tensor"]:
        """Returns the tensors on the meta device: shapes and dtypes without content."""
        import torch

        tensors: dict[str, Tensor] = {}
        for name, (handle, stored) in self._handles.items():
            part = handle.get_slice(stored)
            shape, kind = part.get_shape(), part.get_dtype()
            if kind not in _PACKED and kind not in DTYPES:
                raise CheckpointError(
                    f"{self._folder}: tensor {shorten(repr(name))} is stored in {kind}, which is "
                    f"not supported; save it in one of {', '.join((*DTYPES, *_PACKED))}"
                )
            if kind in _PACKED:
                dtype, shape = getattr(torch, _PACKED[kind]), [*shape[:-1], shape[-1] // 2]
            else:
                dtype = torch_dtype(kind)
            tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        return tensors

    def is_packed(self, name: str) -> bool:
        """Returns whether a byte of the file holds two elements of a tensor."""
        handle, stored = self._handles[name]
        return handle.get_slice(stored).get_dtype() in _PACKED
