"""Built indices kept on disk, so that the next start maps them instead of building them.

An entry is a folder named by the digest of everything its arrays depend on: the name and version
of the algorithm, every option, and the content of the arrays it read (not paths or times, so a
copied dataset hits and a replaced one misses). It is written under a temporary name and renamed;
any number of processes may do so at once, with or without a shared file system.
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
    """Digest of plain options and of the content of arrays."""
    digest = hashlib.sha256(orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS))
    for array in inputs:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def load_or_build(
    folder: str | os.PathLike[str] | None, key: str, build: Callable[[], Arrays]
) -> Arrays:
    """The arrays of a cache entry, mapped read-only; built and stored if they are not there.

    An entry that cannot be read is built anew and replaced. Without a folder, only `build` runs.
    """
    if folder is None:
        return build()
    entry = Path(folder) / key
    found = _load(entry)
    if found is not None:
        return found
    arrays = build()
    _store(entry, arrays)
    return _load(entry) or arrays


def _load(entry: Path) -> Arrays | None:
    """The arrays that a listing names, or None if they are not as it says, or it is damaged."""
    try:
        listed = orjson.loads((entry / _LISTING).read_bytes())
        if listed["sha256"] != _digest(entry.name, listed["arrays"]):
            return None
        arrays = {}
        for name, described in listed["arrays"].items():
            if not _NAME.fullmatch(name):
                return None  # a file elsewhere is no part of this entry
            arrays[name] = _mapped(entry / f"{name}.npy", *described)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a damaged entry, of any kind, is made anew
        return None
    return arrays


def _mapped(path: Path, dtype: str, shape: list[int]) -> NDArray[Any]:
    """Maps an array whose header has to be the one that numpy writes for it.

    A header is compared and not read: a damaged one may name any size.

    Raises:
        ValueError: it is another, or the file has another size.
    """
    kind, wanted = np.dtype(dtype), _header(dtype, shape)
    size = len(wanted) + math.prod(shape) * kind.itemsize
    with path.open("rb") as file:
        if path.stat().st_size != size or file.read(len(wanted)) != wanted:
            raise ValueError(f"{path} holds something else")
    return np.memmap(path, kind, "r", len(wanted), tuple(shape))


def _header(dtype: str, shape: list[int]) -> bytes:
    """Returns the first bytes of a ``.npy`` file of an array in C order."""
    described = {"descr": dtype, "fortran_order": False, "shape": tuple(shape)}
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def _description(array: NDArray[Any]) -> list[Any]:
    return [array.dtype.str, list(array.shape)]


def _digest(key: str, arrays: Any) -> str:
    """Digest of a listing; the arrays have none, because they are mapped and not read."""
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
                    # Not by numpy, whose error on a full disk has no number.
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
            if _load(entry) is None:  # otherwise another process was first: same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
