"""Texts and their images to a multimodal dataset."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ..errors import DataError
from ..files import local_prefix
from ..indexed.builder import IndexedDatasetBuilder
from ..indexed.images import IMAGE_MODE, TEXT_MODE, image_kind, pack_image
from ..sources.opening import open_sources
from ..sources.protocol import Chunk, Fault, Item, UnreadableError
from ..sources.storage import is_url, open_file
from ..tokenizers.protocol import Tokenizer


@dataclass(frozen=True)
class ImagePairsReport:
    """What became of texts and images.

    Attributes:
        prefix: path of the pair without `.bin` or `.idx`.
        pairs: written, each a document.
        tokens: of the texts, those that fill them up included.
        image_bytes: of the images, as their files lie.
        truncated: texts that lost their end to `pad_length`.
        skipped: pairs that were left out.
        first_skipped: why the first of them was; None if there is none.
    """

    prefix: str
    pairs: int
    tokens: int
    image_bytes: int
    truncated: int
    skipped: int
    first_skipped: str | None


class _Pair(NamedTuple):
    ids: list[int]
    image: bytes


def tokenize_image_pairs(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: tuple[str, str] = ("text", "image"),
    image_folder: str | os.PathLike[str] | None = None,
    append_eod: bool = False,
    pad_length: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
) -> ImagePairsReport:
    """Write `{output_prefix}_image_text`, a multimodal dataset of texts beside their images.

    Every line is a document of two sequences: the tokens of the text (mode 0), and the image file,
    byte for byte (mode 1, see `unpack_image`). The layout is that of Megatron's
    `preprocess_mmdata.py`, int32 whatever the vocabulary; images are named by the lines, where
    Megatron takes the files of a folder in the order in which the system lists them.

    Args:
        inputs: JSON lines or Parquet files, packed ones, folders, patterns and URLs.
        output_prefix: path and name.
        tokenizer: of the texts.
        json_keys: key or column of the text, and that of the path of its image.
        image_folder: folder or URL below which the paths are; None for that of each input.
        append_eod: end every text with the end-of-document token.
        pad_length: tokens that every text has: longer ones are cut, and those that are shorter are
            filled up with end-of-document tokens. Needs `append_eod`. None leaves them as they are.
        on_error: "fail" ends the run at a line, a text or an image that cannot be read, "skip"
            leaves it out and counts it.

    Raises:
        DataError: a line that cannot be read, an image that is missing, or a file that is none
            (the line, the path and the reason); no pair at all; `append_eod` with a tokenizer
            without that token, `pad_length` without `append_eod`; an output that is a URL or a
            folder.
    """
    ends = _Ends.of(tokenizer, append_eod, pad_length)
    prefix = f"{local_prefix(output_prefix)}_image_text"
    reader = _Reader(inputs, json_keys, image_folder, tokenizer, on_error == "skip")
    pairs = tokens = image_bytes = truncated = 0
    with IndexedDatasetBuilder(prefix, "int32", multimodal=True) as builder:
        for ids, image in reader.pairs():
            text = ends.apply(ids)
            builder.add_item(text, TEXT_MODE)
            builder.add_item(pack_image(image), IMAGE_MODE)
            builder.end_document()
            pairs, tokens, image_bytes = pairs + 1, tokens + len(text), image_bytes + len(image)
            truncated += pad_length is not None and len(ids) > pad_length
        if not pairs:
            names = ", ".join(os.fspath(path) for path in inputs)
            why = f" (the first was left out: {reader.first_skipped})" if reader.skipped else ""
            raise DataError(f"no text with an image in {names}{why}")
        builder.finalize()
    return ImagePairsReport(
        prefix, pairs, tokens, image_bytes, truncated, reader.skipped, reader.first_skipped
    )


class _Ends(NamedTuple):
    """How texts end: the token, and the length to which it fills them."""

    eod_id: int | None
    length: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, append_eod: bool, pad_length: int | None) -> "_Ends":
        if append_eod and tokenizer.eod_id is None:
            raise DataError("--append-eod: this tokenizer has no end-of-document token")
        if pad_length is not None and not append_eod:
            raise DataError(
                f"--pad-length {pad_length} fills texts up with the end-of-document token; give "
                "--append-eod, too"
            )
        if pad_length is not None and pad_length < 1:
            raise DataError(f"--pad-length {pad_length}; a text has 1 token or more")
        return cls(tokenizer.eod_id if append_eod else None, pad_length)

    def apply(self, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The tokens of a text with what ends them."""
        tokens = np.asarray(ids, np.int64)
        if self.eod_id is None:
            return tokens
        if self.length is None:
            return np.append(tokens, self.eod_id)
        filled = np.full(self.length, self.eod_id, np.int64)
        filled[: len(tokens)] = tokens[: self.length]
        return filled


class _Reader:
    """Reads the lines and their images; what is left out is counted, or ends the run."""

    def __init__(
        self,
        inputs: Sequence[str | os.PathLike[str]],
        keys: tuple[str, str],
        folder: str | os.PathLike[str] | None,
        tokenizer: Tokenizer,
        tolerant: bool,
    ) -> None:
        self._sources = open_sources(inputs, keys)
        self._keys = keys
        self._folder = None if folder is None else os.fspath(folder)
        self._tokenizer = tokenizer
        self._tolerant = tolerant
        self.skipped = 0
        self.first_skipped: str | None = None

    def pairs(self) -> Iterator[_Pair]:
        """Pairs in the order of the input."""
        for source in self._sources:
            for chunk in source.chunks():
                for item in chunk.items(self._keys, None):
                    found = item if isinstance(item, Fault) else self._pair(chunk, item)
                    if isinstance(found, Fault):
                        self._leave_out(found)
                    else:
                        yield found

    def _pair(self, chunk: Chunk, item: Item) -> _Pair | Fault:
        texts, names = item.texts
        try:
            if len(names) != 1:
                raise UnreadableError("type", f"{self._keys[1]!r} has {len(names)} paths, not 1")
            named_by = chunk.fault(item, "", "").path
            image = _image(_beside(names[0], self._folder, named_by))
            return _Pair(list(chain.from_iterable(map(self._tokenizer.encode, texts))), image)
        except UnreadableError as error:
            return chunk.fault(item, error.kind, error.reason)
        except DataError as error:
            return chunk.fault(item, "tokens", str(error))

    def _leave_out(self, fault: Fault) -> None:
        if not self._tolerant:
            raise DataError(str(fault))
        self.skipped += 1
        self.first_skipped = self.first_skipped or str(fault)


def _beside(name: str, folder: str | None, source: str) -> str:
    """Where an image is: below the folder, or below that of the file which names it."""
    if is_url(name) or Path(name).is_absolute():
        return name
    if folder is None:
        folder = source.rpartition("/")[0] if is_url(source) else os.fspath(Path(source).parent)
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.fspath(Path(folder) / name)


def _image(path: str) -> bytes:
    """The bytes of an image file.

    Raises:
        UnreadableError: there is none, or it is no image.
    """
    try:
        with open_file(path) as file:
            data = file.read()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UnreadableError("image", f"there is no image {path}") from None
    if image_kind(data) is None:
        begin = f"begins with {data[:8].hex(' ')}" if data else "is empty"
        raise UnreadableError(
            "image", f"{path} {begin}, which no JPEG, PNG, GIF, WebP, BMP or TIFF does"
        )
    return data
