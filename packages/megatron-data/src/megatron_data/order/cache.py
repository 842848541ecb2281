"""Cache of built indices on disk. A later start maps them instead of building them again.

An entry is a folder. Its name is a digest of everything that its arrays depend on: the name and
version of the algorithm, every option, and the content of the input arrays. Paths and times are not
part of it, so a copied dataset hits the cache and a replaced dataset misses it. An entry is written
under a temporary name and renamed. Any number of processes may write at once, with or without a
shared file system.
"""

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_data.errors import add_path_to_errors
from megatron_data.files import sync_folder

_LISTING = "entry.json"
_NAME = re.compile(r"[a-z_]+")

Arrays = Mapping[str, NDArray[Any]]


def cache_key(options: Mapping[str, Any], *inputs: NDArray[Any]) -> str:
    """Returns a digest of JSON options and of the content of arrays."""
    digest = hashlib.sha256(orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS))
    for array in inputs:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def load_or_build(
    folder: str | os.PathLike[str] | None, key: str, build: Callable[[], Arrays]
) -> Arrays:
    """Returns the arrays of a cache entry, mapped read-only. Builds and stores them if missing.

    An entry that cannot be read is built again and replaced. If `folder` is None, the result of
    `build` is returned and nothing is stored.
    """
    if folder is None:
        return build()
    entry = Path(folder) / key
    cached = _load(entry)
    if cached is not None:
        return cached
    arrays = build()
    _store(entry, arrays)
    return _load(entry) or arrays


def _load(entry: Path) -> Arrays | None:
    """Returns the arrays that the listing names, or None if the entry is missing or damaged."""
    try:
        listed = orjson.loads((entry / _LISTING).read_bytes())
        if listed["sha256"] != _digest(entry.name, listed["arrays"]):
            return None
        arrays = {}
        for name, description in listed["arrays"].items():
            if not _NAME.fullmatch(name):
                return None  # the name may be a path that leads out of this entry
            arrays[name] = _mapped(entry / f"{name}.npy", *description)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - an entry with damage of any kind is built again
        return None
    return arrays


def _mapped(path: Path, dtype: str, shape: list[int]) -> NDArray[Any]:
    """Maps an array after comparing the header of its file with the one that numpy writes.

    The header is compared and not parsed, because a damaged header may name any size.

    Raises:
        ValueError: The header or the size of the file differs.
    """
    array_dtype, expected = np.dtype(dtype), _header(dtype, shape)
    size = len(expected) + math.prod(shape) * array_dtype.itemsize
    with path.open("rb") as file:
        if path.stat().st_size != size or file.read(len(expected)) != expected:
            raise ValueError(f"{path} has another header or size")
    return np.memmap(path, array_dtype, "r", len(expected), tuple(shape))


def _header(dtype: str, shape: list[int]) -> bytes:
    """Returns the first bytes of a ``.npy`` file of an array in C order."""
    description = {"descr": dtype, "fortran_order": False, "shape": tuple(shape)}
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def _description(array: NDArray[Any]) -> list[Any]:
    return [array.dtype.str, list(array.shape)]


def _digest(key: str, arrays: Any) -> str:
    """Returns the digest of a listing. Arrays have no digest, because they are mapped lazily."""
    listed = orjson.dumps([key, arrays], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(listed).hexdigest()


def _store(entry: Path, arrays: Arrays) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        partial.chmod(0o755)
        listed = {name: _description(array) for name, array in arrays.items()}
        content = {"arrays": listed, "sha256": _digest(entry.name, listed)}
        with add_path_to_errors(entry):
            for name, array in arrays.items():
                with (partial / f"{name}.npy").open("wb") as file:
                    file.write(_header(*listed[name]))
                    # np.save raises an OSError without an errno when the disk is full.
                    file.write(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)
                    file.flush()
                    os.fsync(file.fileno())
            (partial / _LISTING).write_bytes(orjson.dumps(content))
            sync_folder(partial)
        if entry.exists() and _load(entry) is None:
            shutil.rmtree(entry, ignore_errors=True)
        try:
            partial.rename(entry)
        except OSError:
            if _load(entry) is None:  # otherwise another process stored the same content first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
