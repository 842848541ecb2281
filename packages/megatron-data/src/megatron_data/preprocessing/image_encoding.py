"""Encodes the texts of a chunk and their images as sequences of a multimodal dataset."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.format import DTYPES
from megatron_data.indexed.images import IMAGE_MODE, TEXT_MODE, image_format, pack_image
from megatron_data.preprocessing.batches import batch_items, encode_or_fault
from megatron_data.preprocessing.protocol import EncodedChunk, EncodedDocuments, Output
from megatron_data.sources.failures import MissingError, NotRegularFileError
from megatron_data.sources.protocol import Chunk, Fault, Item, SupportsImagePairs, UnreadableError
from megatron_data.sources.storage import open_file, stat
from megatron_data.sources.urls import check_untrusted_path, is_url
from megatron_data.tokenizers.protocol import Tokenizer

_CHUNK = 1 << 15
_DTYPE = DTYPES[4]
_STEP = 1 << 20
_PATH_MAX, _NAME_MAX = 4096, 255  # bytes, on Linux
_Pair: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32]]


class TextEnding(NamedTuple):
    """How texts end: the end-of-document token, and the length to which it pads them."""

    eod_id: int | None
    length: int | None

    @classmethod
    def from_options(
        cls, tokenizer: Tokenizer, append_eod: bool, pad_length: int | None
    ) -> "TextEnding":
        """Builds the ending from a user's options.

        Raises:
            DataError: The tokenizer has no end-of-document token, `pad_length` is given without
                `append_eod`, or it is below 1.
        """
        if append_eod and tokenizer.eod_id is None:
            raise DataError(
                "--append-eod: this tokenizer has no end-of-document token; leave the option out"
            )
        if pad_length is not None and not append_eod:
            raise DataError(
                f"--pad-length {pad_length} pads texts with the end-of-document token; give "
                "--append-eod as well"
            )
        if pad_length is not None and pad_length < 1:
            raise DataError(f"--pad-length {pad_length}; give at least 1")
        return cls(tokenizer.eod_id if append_eod else None, pad_length)

    def apply(self, ids: Sequence[int]) -> NDArray[np.int32]:
        """Returns the tokens of a text with its ending, truncated or padded."""
        tokens = np.asarray(ids, _DTYPE)
        if self.eod_id is None:
            return tokens
        if self.length is None:
            return np.append(tokens, np.int32(self.eod_id))
        filled = np.full(self.length, self.eod_id, _DTYPE)
        filled[: len(tokens)] = tokens[: self.length]
        return filled


class ImageLocator(NamedTuple):
    """Finds and reads the image of a text.

    Attributes:
        folder: Folder that paths in lines are relative to; None for the folder of the input file.
        by_text_file: Path of the image of each text file; None if the inputs name their images.
        allow_http: Whether lines may name images on web servers.
        max_bytes: Largest size of an image in bytes; None for no limit.
    """

    folder: str | None
    by_text_file: Mapping[str, str] | None = None
    allow_http: bool = False
    max_bytes: int | None = None

    def path_of(self, chunk: Chunk, item: Item) -> str:
        """Returns the path or URL of the image of an item.

        Raises:
            UnreadableError: The line names no image or several, or the path is invalid.
        """
        read_from = chunk.fault(item, "", "").path
        if self.by_text_file is not None:
            return self.by_text_file[read_from]
        names = item.texts[1]
        if len(names) != 1:
            raise UnreadableError("type", f"{len(names)} paths of images; give exactly 1")
        if not names[0]:
            raise UnreadableError("image", "the path of its image is empty")
        if is_url(names[0]):
            try:
                return check_untrusted_path(names[0], self.allow_http)
            except DataError as error:
                raise UnreadableError("image", str(error)) from None
        folder = _folder_of(read_from) if self.folder is None else self.folder
        if is_url(folder) and not Path(names[0]).is_absolute():
            return f"{folder.rstrip('/')}/{names[0]}"
        return _possible(os.fspath(Path(folder) / names[0]))

    def read(self, path: str) -> bytes:
        """Reads an image file.

        Raises:
            UnreadableError: The file does not exist, is not an image, or is too large.
            DataError: The storage cannot be reached, which is not an error of the line.
        """
        try:
            if not is_url(path):
                size = stat(path).size
                self._check_size(path, size, f"{size:,}")
            data = self._read_within(path)
        except IsADirectoryError:
            raise UnreadableError("image", f"{path} is a folder, not an image") from None
        except (MissingError, FileNotFoundError, NotADirectoryError):
            raise UnreadableError("image", f"there is no image {path}") from None
        except NotRegularFileError as error:
            raise UnreadableError("image", str(error)) from None
        return self._checked(path, data)

    def check_content(self, data: bytes) -> bytes:
        """Checks and returns the bytes of an image in a row.

        Raises:
            UnreadableError: The bytes are not an image, or too many.
        """
        self._check_size("its image", len(data), f"{len(data):,}")
        return self._checked("its image", data)

    def _checked(self, name: str, data: bytes) -> bytes:
        if image_format(data) is None:
            begin = f"begins with {data[:8].hex(' ')}" if data else "is empty"
            raise UnreadableError(
                "image", f"{name} {begin}; it is not a JPEG, PNG, GIF, WebP, BMP or TIFF file"
            )
        return data

    def _read_within(self, path: str) -> bytes:
        """Reads a file up to the limit; a web server may not report the size in advance."""
        parts, size = [], 0
        with open_file(path) as file:
            while data := file.read(_STEP):
                parts.append(data)
                size += len(data)
                self._check_size(path, size, f"at least {size:,}")
        return b"".join(parts)

    def _check_size(self, path: str, size: int, shown: str) -> None:
        if self.max_bytes is not None and size > self.max_bytes:
            limit = f"--max-image-bytes {self.max_bytes:,}"
            raise UnreadableError("image", f"{path} has {shown} bytes, more than {limit}")


class ImagePairEncoder:
    """Encodes pairs of a text and an image; every document has two sequences.

    Args:
        tokenizer: The tokenizer.
        ends: How texts end.
        images: Finds the images.
        keys: Keys of the text and, unless text files are read, of the path of its image.
        max_document_bytes: Largest size of a line, row or text file in bytes; None for no limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: TextEnding,
        images: ImageLocator,
        keys: tuple[str, ...],
        max_document_bytes: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_document_bytes = max_document_bytes
        self._ends = ends
        self._images = images
        self._keys = keys
        self.outputs = (Output("_image_text", _DTYPE, "a text and an image", multimodal=True),)
        self.chunk_bytes = _CHUNK, _CHUNK  # of text; its images are many more bytes

    @property
    def job(self) -> dict[str, Any]:
        """The values that determine the encoding of a pair."""
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "json keys": list(self._keys),
            "end of document": self._ends.eod_id,
            "pad length": self._ends.length,
            "images": self._images.folder,
            "max image bytes": self._images.max_bytes,
            "max document bytes": self.max_document_bytes,
        }

    @property
    def reader_options(self) -> dict[str, Any]:
        """The keys, the limit, and whether the last key may hold the bytes of images."""
        named = {} if self._images.by_text_file is not None else {"images": True}
        return {
            "json_keys": list(self._keys),
            "max_document_bytes": self.max_document_bytes,
            **named,
        }

    def options(self, output: int) -> dict[str, Any]:
        """Returns the folder of the images, and how texts end."""
        return {
            "images": {"folder": self._images.folder, "pad_length": self._ends.length},
            "append_eod": self._ends.eod_id is not None,
        }

    def external_version(self, chunk: Chunk) -> str:
        """Returns a digest of the paths of the images and of their sizes and times or tags."""
        digest = hashlib.sha256()
        for item in self._items(chunk):
            if isinstance(item, Fault) or item.image is not None:
                continue  # the digest of the chunk covers images in rows
            try:
                path = self._images.path_of(chunk, item)
                found = f"{path}\0{' '.join(map(str, stat(path)))}"
            except (UnreadableError, MissingError):
                found = "none"
            digest.update(f"{found}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encodes the pairs of a chunk."""
        version = self.external_version(
            chunk
        )  # before they are read: a change in between is seen later
        pairs: list[_Pair] = []
        faults: list[Fault] = []
        refused: list[int] = []
        tallies: Counter[str] = Counter()
        read = 0
        for found in self._texts(chunk):
            if isinstance(found, Fault):
                faults.append(found)
                continue
            item, ids = found
            made = ids if isinstance(ids, Fault) else self._pair(chunk, item, ids, tallies)
            if isinstance(made, Fault):
                faults.append(made)
                refused.append(read)
            else:
                pairs.append(made)
            read += 1
        sequences = np.full(len(pairs), 2, np.int32)
        arrays = [array for pair in pairs for array in pair]
        encoded = EncodedDocuments(
            np.concatenate([np.empty(0, _DTYPE), *arrays]),
            np.array([len(array) for array in arrays], np.int32),
            sequences,
            np.tile(np.array([TEXT_MODE, IMAGE_MODE], np.int8), len(pairs)),
        )
        return EncodedChunk([encoded], faults, refused, tallies, version)

    def _items(self, chunk: Chunk) -> Iterator[Item | Fault]:
        if isinstance(chunk, SupportsImagePairs) and self._images.by_text_file is None:
            return chunk.pairs(self._keys, self.max_document_bytes)
        return chunk.items(self._keys, self.max_document_bytes)

    def _texts(self, chunk: Chunk) -> Iterator[Fault | tuple[Item, Sequence[int] | Fault]]:
        """Yields each item with its tokens or a fault; a fault alone if there is no item."""
        for found in batch_items(self._items(chunk)):
            if isinstance(found, Fault):
                yield found
                continue
            for items, encoded in encode_or_fault(chunk, found, self._encode):
                if isinstance(encoded, Fault):
                    yield items[0], encoded
                else:
                    yield from zip(items, encoded, strict=True)

    def _encode(self, items: list[Item]) -> list[list[int]]:
        texts = [item.texts[0] for item in items]
        encoded = iter(self.tokenizer.encode_batch(list(chain.from_iterable(texts))))
        return [list(chain.from_iterable(islice(encoded, len(text)))) for text in texts]

    def _pair(
        self, chunk: Chunk, item: Item, ids: Sequence[int], tallies: Counter[str]
    ) -> _Pair | Fault:
        try:
            if item.image is None:
                image = self._images.read(self._images.path_of(chunk, item))
            else:
                image = self._images.check_content(item.image)
        except UnreadableError as error:
            return chunk.fault(item, error.kind, error.reason)
        text = self._ends.apply(ids)
        length = self._ends.length
        tallies.update(
            text_tokens=len(text),
            image_bytes=len(image),
            truncated=length is not None and len(ids) > length,
        )
        return text, pack_image(image)


def _possible(path: str) -> str:
    """Returns a local path if it is valid; an image as base64 is not.

    Raises:
        UnreadableError: The path is too long or contains a null byte.
    """
    encoded = os.fsencode(path)
    longest_name = max(map(len, encoded.split(b"/")))
    if len(encoded) >= _PATH_MAX or longest_name > _NAME_MAX or b"\0" in encoded:
        raise UnreadableError("image", f"invalid path: {path[:60]!r}…; give the path of a file")
    return path


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0] if is_url(path) else os.fspath(Path(path).parent)
