"""Which safetensors files of a folder hold its weights.

The rules are those of transformers 5.23: the file that ``transformers_weights`` in ``config.json``
names, else ``model.safetensors``, else the files of ``model.safetensors.index.json``. Where another
choice would give other weights, the folder is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ckpt.errors import CheckpointError, shorten
from megatron_ckpt.json_input import Fields, parse_object
from megatron_ckpt.paths import check_name, locate, read_bytes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPLICIT = "transformers_weights"
"""The setting of a ``config.json`` that names the file of the weights."""
LARGEST_JSON = 100 << 20
"""Bytes, the limit of a safetensors header."""
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
_SHOWN = 3


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold the weights of a folder.

    Attributes:
        names: Names of safetensors files in the folder.
        note: A sentence about files that are not read; None if there are none.
    """

    names: tuple[str, ...]
    note: str | None = None


def find_weight_files(folder: Path, config: Mapping[str, Any]) -> WeightFiles:
    """Returns the files that hold the weights of a folder.

    Args:
        folder: The folder.
        config: Content of its ``config.json``.

    Raises:
        CheckpointError: There is no such file, a name is unsafe, or ``model.safetensors`` and the
            files of the index hold different weights.
    """
    explicit = config.get(EXPLICIT)
    if explicit is not None:
        return WeightFiles(_explicit_files(folder, explicit))
    single, index = (folder / WEIGHTS).exists(), (folder / INDEX).exists()
    if not index:
        if not single:
            raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}{_lying(folder)}")
        return WeightFiles((WEIGHTS,))
    shards = _files_of_index(folder, INDEX)
    if not single or shards == (WEIGHTS,):
        return WeightFiles(shards)
    absent = [name for name in shards if not (folder / name).exists()]
    if absent:
        note = f"{folder}: {INDEX} names {_list(absent)}, which is missing; {WEIGHTS} is read"
        return WeightFiles((WEIGHTS,), note)
    different = _first_difference(folder, (WEIGHTS,), shards)
    if different is not None:
        raise CheckpointError(
            f"{folder} has two models, {WEIGHTS} and {_list(shards)} of {INDEX}, which differ in "
            f"{different}; remove one (transformers reads {WEIGHTS})"
        )
    return WeightFiles((WEIGHTS,))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a folder.

    Raises:
        CheckpointError: The file is missing, too large or not a JSON object.
    """
    try:
        return parse_object(read_bytes(folder, name, LARGEST_JSON), folder / name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder / name} is missing; use a folder of a Hugging Face model"
        ) from None


def open_tensors(folder: Path, name: str) -> Any:
    """Opens a safetensors file and returns its handle.

    Raises:
        CheckpointError: The file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(locate(folder, name), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {shorten(error)}") from error


def tensors_equal(one: Any, other: Any, name: str) -> bool:
    """Returns whether two open files hold the same dtype, shape and bytes under a name."""
    import torch

    left, right = one.get_slice(name), other.get_slice(name)
    if (left.get_dtype(), left.get_shape()) != (right.get_dtype(), right.get_shape()):
        return False
    first, second = one.get_tensor(name), other.get_tensor(name)
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (first, second)))


def _explicit_files(folder: Path, name: object) -> tuple[str, ...]:
    where = f"{folder / 'config.json'}: {EXPLICIT}"
    file = check_name(name, where)
    if file.endswith(".safetensors.index.json"):
        return _files_of_index(folder, file)
    if not file.endswith(".safetensors"):
        raise CheckpointError(f"{where} is {file!r}; name a .safetensors file or its index")
    return (file,)


def _files_of_index(folder: Path, name: str) -> tuple[str, ...]:
    """Returns the names of the weight files in an index."""
    weight_map = Fields(read_json(folder, name), str(folder / name)).inner("weight_map")
    files = {check_name(file, weight_map.where) for file in weight_map.content.values()}
    return tuple(sorted(files))


def _first_difference(folder: Path, one: Sequence[str], other: Sequence[str]) -> str | None:
    """Returns the first tensor, quoted, that two sets of files do not share; None if all agree."""
    with ExitStack() as stack:
        left, right = (
            dict(_tensors(stack, folder, sorted(files, reverse=True))) for files in (one, other)
        )
        for name in sorted(left.keys() | right.keys()):
            both = name in left and name in right
            if not both or not tensors_equal(left[name], right[name], name):
                return shorten(repr(name))
    return None


def _tensors(stack: ExitStack, folder: Path, files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the name of each tensor in the files and the open file that holds it."""
    for file in files:
        handle = stack.enter_context(open_tensors(folder, file))
        for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
            yield name, handle


def _lying(folder: Path) -> str:
    """Returns what to do, with the names of other files of weights."""
    names = sorted({path.name for pattern in _OTHERS for path in folder.glob(pattern)})
    if not names:
        return "; save the model with safetensors"
    if any(name.endswith(".safetensors") for name in names):
        return f", only {_list(names)}; name the file in {EXPLICIT} of config.json, or rename it"
    return f", only {_list(names)}; save the model with safetensors"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(shorten, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
