"""Access to files that are named by a manifest or lie in a folder of unknown origin.

All names pass through this module: those in `MANIFEST.json` and `model.safetensors.index.json`,
attachments, files of a Hugging Face folder, and the names that an export writes.

A name is relative, has ``/`` between its parts and stays below its folder. A file must be a regular
file in that folder after links are resolved; pipes and devices are never read.
"""

import os
import stat
from pathlib import Path

from megatron_ckpt.errors import CheckpointError

#: Largest size in bytes of a file that is read into memory: manifests, configurations, tokenizers.
MAX_FILE_BYTES = 1 << 30
_LONGEST_PART = 255  # bytes, the limit of the usual file systems
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}


def check_name(name: object, where: str) -> str:
    """Returns ``name`` if it is a safe relative name of a file.

    Args:
        name: The name as read from a file, of any type.
        where: What contains the name, for the message.

    Raises:
        CheckpointError: The name is not a string, is absolute, has an empty, ``.`` or ``..`` part,
            a backslash, an unprintable character, or a part that is too long for a file system.
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
            f"{where}: {shown} is not a valid file name; names must be relative and stay inside "
            "the folder"
        )
    return str(name)


def locate(folder: Path, name: str) -> Path:
    """Returns the resolved path of the file ``name`` in ``folder``.

    Files of a Hugging Face cache are links from ``snapshots/REVISION`` to ``blobs`` beside it;
    these are followed. Any other link out of the folder is refused.

    Raises:
        CheckpointError: The name is unsafe, a link leads out of the folder, or the file is not
            regular.
        OSError: There is no such file.
    """
    path = folder / check_name(name, str(folder))
    real = Path(os.path.realpath(path, strict=True))
    root = Path(os.path.realpath(folder))
    inside = real.is_relative_to(root)
    if not inside and root.parent.name == "snapshots":
        inside = real.is_relative_to(root.parent.parent / "blobs")
    if not inside:
        raise CheckpointError(
            f"{path} is a link to {real}, outside the folder; replace it by the file itself"
        )
    _check_regular(path, real.lstat().st_mode)
    return real


def file_size(folder: Path, name: str) -> int:
    """Returns the size in bytes of a file in ``folder``; raises like `locate`."""
    return locate(folder, name).stat().st_size


def open_file(folder: Path, name: str) -> int:
    """Opens a file in ``folder`` for reading and returns its descriptor; raises like `locate`."""
    # All links are resolved; a link that replaced the file since then is not followed.
    return open_regular(locate(folder, name), follow=False)


def open_regular(path: Path, *, follow: bool = True) -> int:
    """Opens a regular file for reading and returns its descriptor.

    Args:
        path: The path of the file.
        follow: Whether ``path`` may be a link.

    Raises:
        CheckpointError: The file is not regular.
        OSError: The file cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except CheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(folder: Path, name: str, largest: int = MAX_FILE_BYTES) -> bytes:
    """Returns the content of a file in ``folder``; raises like `locate`.

    Raises:
        CheckpointError: The file has more than ``largest`` bytes.
    """
    with os.fdopen(open_file(folder, name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > largest:
            raise CheckpointError(
                f"{folder / name} has {size} bytes; the limit for such files is {largest}"
            )
        return stream.read()


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError(f"{path} is {what}, not a regular file")
