"""Writes an indexed dataset atomically."""

import os
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, local_prefix
from megatron_data.indexed.format import LARGEST_LENGTH, Header, TokenType, bin_path, idx_path
from megatron_data.indexed.images import count_images
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.plural import plural
from megatron_data.sources.block_cache import StorageCache


class WrittenFile(NamedTuple):
    """Name, size and digests of a finished file.

    Attributes:
        path: File name without folder.
        bytes: Size in bytes.
        sha256: SHA-256 of the file in hexadecimal.
        blocks: SHA-256 of each block of 64 MiB in hexadecimal.
    """

    path: str
    bytes: int
    sha256: str
    blocks: list[str]

    @classmethod
    def of(cls, file: AtomicFile) -> "WrittenFile":
        """Returns name, size and digests of a file that was written."""
        return cls(file.path.name, file.bytes, file.digests.sha256, file.digests.blocks)


class WrittenDataset(NamedTuple):
    """The result of `IndexedDatasetBuilder.finalize`.

    Attributes:
        bin: The `.bin` file.
        idx: The `.idx` file.
        documents: Number of documents.
        sequences: Number of sequences, including images.
        tokens: Number of tokens, without images.
        images: Number of sequences that are images.
        image_bytes: Size of the images in the `.bin` in bytes.
    """

    bin: WrittenFile
    idx: WrittenFile
    documents: int
    sequences: int
    tokens: int
    images: int
    image_bytes: int


class IndexedDatasetBuilder:
    """Writes sequences to `PREFIX.bin` and `PREFIX.idx`.

    Both files are written under temporary names. `finalize` flushes them to the disk and renames
    them, the `.bin` first. As a context manager, the builder discards both files if the block
    raises or ends without `finalize`.

    Args:
        prefix: Path of the two files without `.bin` or `.idx`.
        dtype: Token type; see `choose_dtype`. Defaults to int32.
        multimodal: Whether sequences have modes. Defaults to False.

    Raises:
        DataError: The format does not support `dtype`, `prefix` is a URL or a folder, or another
            process is writing the files.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: TokenType | type[np.generic] | str = "int32",
        multimodal: bool = False,
    ) -> None:
        self.prefix = local_prefix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        Header(
            self.dtype, 0, 0
        ).pack()  # raises an error if the format does not support the token type
        self.tokens = 0
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._bin = AtomicFile(bin_path(self.prefix))

    def add_item(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Appends one sequence to the current document, which `end_document` ends."""
        data = self._convert(tokens)
        self._append(data, [len(data)], [mode])

    def end_document(self) -> None:
        """Ends the current document."""
        self._bounds.append(len(self._lengths))

    def add_document(
        self, tokens: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Appends a document.

        Args:
            tokens: Tokens of all its sequences, concatenated.
            lengths: Length of each sequence in tokens.
            modes: Mode of each sequence in a multimodal dataset. Defaults to 0, which is text.

        Raises:
            DataError: The lengths do not sum to the number of tokens, or a token does not fit the
                token type.
        """
        self._append(self._convert(tokens), lengths, modes)
        self.end_document()

    def add_documents(
        self,
        tokens: ArrayLike,
        lengths: NDArray[np.integer],
        sequences: NDArray[np.integer],
        modes: NDArray[np.integer] | None = None,
    ) -> None:
        """Appends many documents at once.

        Args:
            tokens: Tokens of all sequences, concatenated.
            lengths: Length of each sequence in tokens.
            sequences: Number of sequences of each document; 0 for an empty document.
            modes: Mode of each sequence in a multimodal dataset. Defaults to 0, which is text.

        Raises:
            DataError: The numbers of sequences, modes or tokens do not agree, a length is negative
                or too large for the format, or a token does not fit the token type.
        """
        if int(np.sum(sequences, dtype=np.int64)) != len(lengths):
            raise DataError(
                f"the documents have {np.sum(sequences)} sequences, but {len(lengths)} lengths are "
                "given"
            )
        start = len(self._lengths)
        self._append(self._convert(tokens), lengths, modes)
        bounds = np.cumsum(sequences, dtype=np.int64) + start
        self._bounds.frombytes(bounds.tobytes())

    def add_index(
        self, prefix: str | os.PathLike[str], storage: StorageCache | None = None
    ) -> None:
        """Appends a whole dataset, including document bounds and modes.

        Args:
            prefix: Path of the dataset without `.bin` or `.idx`, or a URL.
            storage: Cache for a URL.

        Raises:
            DataError: The dataset is damaged or cannot be read, it has another token type, or only
                one of the two datasets is multimodal.
        """
        with IndexedDataset(prefix, storage) as dataset:
            dataset.check()
            self.copy_documents(dataset, 0, dataset.num_documents)

    def copy_documents(self, dataset: IndexedDataset, first: int, last: int) -> None:
        """Appends the documents `[first, last)` of a dataset whose index was checked.

        Raises:
            DataError: The token types differ, or only one of the two datasets is multimodal.
        """
        if dataset.dtype != self.dtype:
            raise DataError(
                f"cannot append {dataset.prefix} ({dataset.dtype}) to {self.prefix} "
                f"({self.dtype}): the token types differ"
            )
        if len(dataset) and (dataset.sequence_modes is None) != (self._modes is None):
            raise DataError(
                f"cannot append {dataset.prefix} to {self.prefix}: only one of them is multimodal"
            )
        bounds = dataset.document_indices[first : last + 1]
        sequences = slice(int(bounds[0]), int(bounds[-1]))
        lengths = dataset.sequence_lengths[sequences]
        begin, end = dataset.tokens_before(bounds[[0, -1]]).tolist()
        for tokens in dataset.scan(begin, end):
            self._bin.write(tokens.data)
        self.tokens += end - begin
        shifted = bounds[1:] - sequences.start + len(self._lengths)
        self._lengths.frombytes(lengths.tobytes())
        self._bounds.frombytes(shifted.tobytes())
        if self._modes is not None and dataset.sequence_modes is not None:
            self._modes.frombytes(dataset.sequence_modes[sequences].tobytes())

    def finalize(self) -> WrittenDataset:
        """Writes the index and renames both files to their final names.

        Raises:
            DataError: The last document was not ended with `end_document`.
        """
        if self._bounds[-1] != len(self._lengths):
            count = len(self._lengths) - self._bounds[-1]
            raise DataError(
                f"{self.prefix}: {plural(count, 'sequence')} at the end in no document; call "
                "end_document before finalize"
            )
        lengths = np.frombuffer(self._lengths, np.int32)
        pointers = np.zeros(len(lengths), np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with AtomicFile(idx_path(self.prefix)) as index:
            index.write(Header(self.dtype, len(lengths), len(self._bounds)).pack())
            index.write(lengths.data)
            index.write(pointers.data)
            index.write(self._bounds)
            if self._modes is not None:
                index.write(self._modes)
            # An old index must never exist beside the new tokens.
            idx_path(self.prefix).unlink(missing_ok=True)
            self._bin.commit()
        images = image_numbers = 0
        if self._modes is not None:
            images, image_numbers = count_images(lengths, np.frombuffer(self._modes, np.int8))
        return WrittenDataset(
            WrittenFile.of(self._bin),
            WrittenFile.of(index),
            documents=len(self._bounds) - 1,
            sequences=len(self._lengths),
            tokens=self.tokens - image_numbers,
            images=images,
            image_bytes=image_numbers * self.dtype.itemsize,
        )

    def discard(self) -> None:
        """Deletes everything written. Does nothing after `finalize`."""
        self._bin.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def _convert(self, tokens: ArrayLike) -> NDArray[Any]:
        array = np.asarray(tokens)
        if array.dtype == self.dtype:
            return np.ascontiguousarray(array).reshape(-1)
        if array.size == 0:
            return np.empty(0, self.dtype)
        if self.dtype.kind in "iu":
            if array.dtype.kind not in "iu":
                raise DataError(f"tokens of type {array.dtype} cannot be stored as {self.dtype}")
            limits = np.iinfo(self.dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"token {low if low < limits.min else high} does not fit {self.dtype} in "
                    f"{self.prefix}.bin; build it with a wider type"
                )
        return array.astype(self.dtype).reshape(-1)

    def _append(
        self,
        tokens: NDArray[Any],
        lengths: Sequence[int] | NDArray[np.integer],
        modes: Sequence[int] | NDArray[np.integer] | None,
    ) -> None:
        total = int(np.sum(lengths, dtype=np.int64))
        if total != len(tokens):
            raise DataError(f"{len(tokens)} tokens, but the sequence lengths sum to {total}")
        if len(lengths) and int(np.max(lengths)) > LARGEST_LENGTH:
            raise DataError(
                f"a sequence has {int(np.max(lengths)):,} tokens; the format allows at most "
                f"{LARGEST_LENGTH:,}"
            )
        if len(lengths) and int(np.min(lengths)) < 0:
            raise DataError(f"the length of a sequence is {int(np.min(lengths))}; give at least 0")
        if self._modes is not None:
            modes = [0] * len(lengths) if modes is None else modes
            if len(modes) != len(lengths):
                raise DataError(f"{len(lengths)} sequences, but {len(modes)} modes are given")
            self._modes.frombytes(np.asarray(modes, np.int8).tobytes())
        self._bin.write(tokens.data)
        self.tokens += len(tokens)
        self._lengths.frombytes(np.asarray(lengths, np.int32).tobytes())
