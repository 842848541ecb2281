"""Images as sequences of a multimodal dataset, as Megatron's `preprocess_mmdata.py` lays them.

The sequence of an image is int32: how many bytes of 0 fill its last number (0 to 3), and then the
bytes of the image file, four to a number.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.reader import IndexedDataset

TEXT_MODE, IMAGE_MODE = 0, 1
"""Modes of the sequences of a multimodal dataset."""

_DTYPE = np.dtype("<i4")
MAX_PADDING_BYTES = _DTYPE.itemsize - 1
"""Bytes that may fill up the last number of an image."""

_BEGINS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
}


def image_format(data: bytes) -> str | None:
    """Which kind of image file this is by its first bytes, such as "PNG"; None if it is none.

    JPEG, PNG, GIF, WebP, BMP and TIFF are known; nothing is decoded.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((kind for begin, kind in _BEGINS.items() if data.startswith(begin)), None)


def pack_image(data: bytes) -> NDArray[np.int32]:
    """Returns the bytes of an image file as a sequence, int32."""
    padding = -len(data) % _DTYPE.itemsize
    packed = np.empty(1 + (len(data) + padding) // _DTYPE.itemsize, _DTYPE)
    packed[0] = padding
    packed[1:] = np.frombuffer(data + bytes(padding), _DTYPE)
    return packed


def unpack_image(sequence: NDArray[np.integer]) -> bytes:
    """Returns the bytes of the image file that a sequence holds.

    Raises:
        DataError: it is no image: not int32, or it does not begin with 0 to 3.
    """
    if sequence.dtype != _DTYPE or not len(sequence) or not 0 <= sequence[0] <= MAX_PADDING_BYTES:
        begin = f"begins with {sequence[0]}" if len(sequence) else "is empty"
        raise DataError(
            f"a sequence of {sequence.dtype} that {begin} holds no image; those are int32, begin "
            "with 0 to 3 and have mode 1 in sequence_modes"
        )
    data = np.ascontiguousarray(sequence[1:]).tobytes()
    return data[: len(data) - int(sequence[0])]


def count_images(lengths: NDArray[np.int32], modes: NDArray[np.int8]) -> tuple[int, int]:
    """Returns how many sequences are images, and how many numbers those have together.

    Args:
        lengths: of the sequences, `[S]`.
        modes: of the sequences, `[S]`.
    """
    images = modes != TEXT_MODE
    return int(np.count_nonzero(images)), int(lengths[images].sum(dtype=np.int64))


def text_mask(dataset: IndexedDataset, begin: int, end: int) -> NDArray[np.bool_]:
    """Which of the tokens from `begin` to `end` stand in text; all where there are no modes.

    Args:
        dataset: whose index is in order.
        begin: number of the first token.
        end: number of the one after the last.

    Returns:
        bool `[end - begin]`.
    """
    modes = dataset.sequence_modes
    if modes is None:
        return np.ones(end - begin, bool)
    starts, itemsize = dataset.sequence_pointers, dataset.dtype.itemsize
    first, last = np.searchsorted(starts, np.array([begin, end]) * itemsize, "right")
    # From the sequence that holds the first of them, or ends before it, to that of the last.
    inner = np.clip(starts[first:last] // itemsize, begin, end)
    edges = np.concatenate(([begin], inner, [end]))
    return np.repeat(modes[first - 1 : last] == TEXT_MODE, edges[1:] - edges[:-1])
