"""Files named by a manifest or lying in a folder from elsewhere: which are opened, and how.

Names in `MANIFEST.json` and in `model.safetensors.index.json`, attachments, the files of a Hugging
Face folder and the names that an export writes all pass through here. Nothing else decides.

A name is relative, with ``/`` between its parts, and stays below its folder. A file is a regular
one that lies in that folder once links are resolved; a pipe or a device is never read.
"""

import os
import stat
from pathlib import Path

from megatron_ckpt.errors import CheckpointError

#: Bytes of a file that is read into memory as a whole: manifests, configurations, tokenizers.
MAX_FILE_BYTES = 1 << 30
_LONGEST_PART = 255  # bytes, the limit of the usual file systems
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}


def check_name(name: object, where: str) -> str:
    """Returns ``name`` if it is the safe relative name of a file.

    Args:
        name: as it stands in a file, of any type.
        where: what holds the name, for the message.

    Raises:
        CheckpointError: not a string; absolute, with an empty, ``.`` or ``..`` part, a backslash or
            a character that cannot be printed, or a part too long for a file system.
    """
    safe = (
        isinstance(name, str)
        and name.isprintable()
        and "\\" not in name
        and all(
            part not in ("", ".", "..") and len(part.encode()) <= _LONGEST_PART
            for part in name.split("/")
        )
    )
    if not safe:
        shown = repr(name) if len(repr(name)) <= _LONGEST_PART else f"{repr(name)[:60]}..."
        raise CheckpointError(
            f"{where}: {shown} is no name of a file in it: names are relative and stay inside the "
            "folder"
        )
    return str(name)


def locate(folder: Path, name: str) -> Path:
    """Returns where the file ``name`` of ``folder`` really lies.

    Files of a Hugging Face cache are links from ``snapshots/REVISION`` to ``blobs`` beside it;
    these are followed. Any other link out of the folder is refused.

    Raises:
        CheckpointError: an unsafe name, a link out of the folder, or no regular file.
        OSError: there is no such file.
    """
    path = folder / check_name(name, str(folder))
    real = Path(os.path.realpath(path, strict=True))
    root = Path(os.path.realpath(folder))
    inside = real.is_relative_to(root)
    if not inside and root.parent.name == "snapshots":
        inside = real.is_relative_to(root.parent.parent / "blobs")
    if not inside:
        raise CheckpointError(
            f"{path} leads to {real}, which lies outside the folder: put the file itself there"
        )
    _check_regular(path, real.lstat().st_mode)
    return real


def file_size(folder: Path, name: str) -> int:
    """Returns the bytes of a file of ``folder``; raises as `locate` does."""
    return locate(folder, name).stat().st_size


def open_file(folder: Path, name: str) -> int:
    """Open a file of ``folder`` for reading and return its descriptor; raises as `locate` does."""
    # All links are resolved; one that takes the file's place meanwhile was not checked.
    return open_regular(locate(folder, name), follow=False)


def open_regular(path: Path, *, follow: bool = True) -> int:
    """Opens a regular file for reading and returns its descriptor.

    Args:
        path: of the file.
        follow: whether ``path`` may be a link.

    Raises:
        CheckpointError: no regular file.
        OSError: the file cannot be opened.
    """
    # Without O_NONBLOCK opening a pipe waits for somebody to write into it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except CheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(folder: Path, name: str, largest: int = MAX_FILE_BYTES) -> bytes:
    """Returns the content of a file of ``folder``; raises as `locate` does.

    Raises:
        CheckpointError: it has more than ``largest`` bytes.
    """
    with os.fdopen(open_file(folder, name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise CheckpointError(
                f"{folder / name} has {size} bytes; files of its kind have at most {largest}"
            )
        return stream.read()


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path} is {what}, not a regular file")
