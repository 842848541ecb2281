"""Images as sequences of a multimodal dataset, in the layout of Megatron's `preprocess_mmdata.py`.

The sequence of an image is int32. The first element is the number of padding bytes (0 to 3) in the
last element. The other elements hold the bytes of the image file, four bytes each.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.reader import IndexedDataset

TEXT_MODE, IMAGE_MODE = 0, 1
"""Modes of the sequences of a multimodal dataset."""

_DTYPE = np.dtype("<i4")
MAX_PADDING_BYTES = _DTYPE.itemsize - 1
"""Largest number of padding bytes in the last element of an image."""

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
    """Returns the format of an image file, such as "PNG", by its first bytes, or None.

    Known formats are JPEG, PNG, GIF, WebP, BMP and TIFF. The image is not decoded.
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((kind for begin, kind in _BEGINS.items() if data.startswith(begin)), None)


def pack_image(data: bytes) -> NDArray[np.int32]:
    """Returns the bytes of an image file as a sequence, int32 `[1 + ceil(bytes / 4)]`."""
    padding = -len(data) % _DTYPE.itemsize
    packed = np.empty(1 + (len(data) + padding) // _DTYPE.itemsize, _DTYPE)
    packed[0] = padding
    packed[1:] = np.frombuffer(data + bytes(padding), _DTYPE)
    return packed


def unpack_image(sequence: NDArray[np.integer]) -> bytes:
    """Returns the bytes of the image file in a sequence.

    Raises:
        DataError: The sequence is not an image: it is not int32 or does not begin with 0 to 3.
    """
    if sequence.dtype != _DTYPE or not len(sequence) or not 0 <= sequence[0] <= MAX_PADDING_BYTES:
        begin = f"begins with {sequence[0]}" if len(sequence) else "is empty"
        raise DataError(
            f"a sequence of {sequence.dtype} that {begin} is not an image; images are int32, begin "
            "with 0 to 3 and have mode 1 in sequence_modes"
        )
    data = np.ascontiguousarray(sequence[1:]).tobytes()
    return data[: len(data) - int(sequence[0])]


def count_images(lengths: NDArray[np.int32], modes: NDArray[np.int8]) -> tuple[int, int]:
    """Returns the number of images, and the number of elements of all images.

    Args:
        lengths: Length of each sequence, int32 `[S]`.
        modes: Mode of each sequence, int8 `[S]`.
    """
    images = modes != TEXT_MODE
    return int(np.count_nonzero(images)), int(lengths[images].sum(dtype=np.int64))


def text_mask(dataset: IndexedDataset, begin: int, end: int) -> NDArray[np.bool_]:
    """Returns which of the tokens `[begin, end)` are text and not bytes of images.

    Args:
        dataset: A dataset whose index was checked. Without modes, all its tokens are text.
        begin: Index of the first token.
        end: Index after the last token.

    Returns:
        True for text, bool `[end - begin]`.
    """
    modes = dataset.sequence_modes
    if modes is None:
        return np.ones(end - begin, bool)
    starts, itemsize = dataset.sequence_pointers, dataset.dtype.itemsize
    first, last = np.searchsorted(starts, np.array([begin, end]) * itemsize, "right")
    # Starts of the sequences that begin inside the range; sequence `first - 1` holds its beginning.
    inner = np.clip(starts[first:last] // itemsize, begin, end)
    edges = np.concatenate(([begin], inner, [end]))
    return np.repeat(modes[first - 1 : last] == TEXT_MODE, edges[1:] - edges[:-1])
