"""Writing an indexed dataset so that a half-written one is never taken for whole."""

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
from megatron_data.sources.block_cache import StorageCache


class WrittenFile(NamedTuple):
    """A finished file: its name, its size in bytes and its digests in hexadecimal.

    Attributes:
        path: the name.
        bytes: the size.
        sha256: of the whole.
        blocks: SHA-256 of every 64 MiB.
    """

    path: str
    bytes: int
    sha256: str
    blocks: list[str]

    @classmethod
    def of(cls, file: AtomicFile) -> "WrittenFile":
        """Returns what was written to a file."""
        return cls(file.path.name, file.bytes, file.digests.sha256, file.digests.blocks)


class WrittenDataset(NamedTuple):
    """What `IndexedDatasetBuilder.finalize` wrote.

    Attributes:
        bin: the tokens.
        idx: the index.
        documents: how many.
        sequences: how many, images included.
        tokens: of all texts.
        images: sequences that are images.
        image_bytes: of the `.bin`, which these take.
    """

    bin: WrittenFile
    idx: WrittenFile
    documents: int
    sequences: int
    tokens: int
    images: int
    image_bytes: int


class IndexedDatasetBuilder:
    """Collects sequences into `PREFIX.bin` and `PREFIX.idx`.

    Both files are written under temporary names; `finalize` flushes them to the disk and renames
    them, the `.bin` first. Used as a context manager it discards everything when the block fails
    or ends without `finalize`.

    Args:
        prefix: path of the pair without `.bin` or `.idx`.
        dtype: token type; see `choose_dtype`.
        multimodal: whether every sequence has a mode.

    Raises:
        DataError: a token type the format does not know, a prefix that is a URL or a folder, or
            another process writes it.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: TokenType | type[np.generic] | str = "int32",
        multimodal: bool = False,
    ) -> None:
        self.prefix = local_prefix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        Header(self.dtype, 0, 0).pack()  # refuses a token type the format does not know
        self.tokens = 0
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._bin = AtomicFile(bin_path(self.prefix))

    def add_item(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Appends one sequence; `end_document` closes the document it belongs to."""
        data = self._convert(tokens)
        self._append(data, [len(data)], [mode])

    def end_document(self) -> None:
        """Closes the document of the sequences added since the last one."""
        self._bounds.append(len(self._lengths))

    def add_document(
        self, tokens: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Appends a document: its tokens, and the lengths of its sequences.

        Raises:
            DataError: lengths that do not sum to the tokens, or tokens the type cannot hold.
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
            tokens: all tokens, joined.
            lengths: tokens per sequence.
            sequences: sequences per document; 0 for an empty document.
            modes: of every sequence, in a multimodal dataset; None for text alone.
        """
        if int(np.sum(sequences, dtype=np.int64)) != len(lengths):
            raise DataError(f"{np.sum(sequences)} sequences in documents, {len(lengths)} lengths")
        start = len(self._lengths)
        self._append(self._convert(tokens), lengths, modes)
        bounds = np.cumsum(sequences, dtype=np.int64) + start
        self._bounds.frombytes(bounds.tobytes())

    def add_index(
        self, prefix: str | os.PathLike[str], storage: StorageCache | None = None
    ) -> None:
        """Appends a whole dataset, documents and modes included.

        Args:
            prefix: path of the pair without `.bin` or `.idx`, or a URL.
            storage: the cache for a URL.

        Raises:
            DataError: it is damaged, has another token type, or one of the two has modes; a URL
                that cannot be read.
        """
        with IndexedDataset(prefix, storage) as other:
            other.check()
            self.add_part(other, 0, other.num_documents)

    def add_part(self, other: IndexedDataset, first: int, last: int) -> None:
        """Appends documents `first` to `last` (not included) of a dataset that is in order.

        Raises:
            DataError: it has another token type, or one of the two has modes.
        """
        if other.dtype != self.dtype:
            raise DataError(
                f"cannot append {other.prefix} ({other.dtype}) to {self.prefix} "
                f"({self.dtype}): the token types differ"
            )
        if len(other) and (other.sequence_modes is None) != (self._modes is None):
            raise DataError(
                f"cannot append {other.prefix} to {self.prefix}: only one of them is multimodal"
            )
        bounds = other.document_indices[first : last + 1]
        sequences = slice(int(bounds[0]), int(bounds[-1]))
        lengths = other.sequence_lengths[sequences]
        begin, end = other.tokens_before(bounds[[0, -1]]).tolist()
        for tokens in other.scan(begin, end):
            self._bin.write(tokens.data)
        self.tokens += end - begin
        shifted = bounds[1:] - sequences.start + len(self._lengths)
        self._lengths.frombytes(lengths.tobytes())
        self._bounds.frombytes(shifted.tobytes())
        if self._modes is not None and other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes[sequences].tobytes())

    def finalize(self) -> WrittenDataset:
        """Writes the index and gives both files their names.

        Raises:
            DataError: sequences after the last `end_document`.
        """
        if self._bounds[-1] != len(self._lengths):
            raise DataError(
                f"{len(self._lengths) - self._bounds[-1]} sequences of {self.prefix} belong to no "
                "document; call end_document after the last one"
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
            # An older index must never be seen beside the new tokens.
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
        """Drops everything written. Does nothing after `finalize`."""
        self._bin.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def _convert(self, tokens: ArrayLike) -> NDArray[Any]:
        given = np.asarray(tokens)
        if given.dtype == self.dtype:
            return np.ascontiguousarray(given).reshape(-1)
        if given.size == 0:
            return np.empty(0, self.dtype)
        if self.dtype.kind in "iu":
            if given.dtype.kind not in "iu":
                raise DataError(f"tokens of type {given.dtype} cannot be stored as {self.dtype}")
            limits = np.iinfo(self.dtype)
            low, high = int(given.min()), int(given.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"token {low if low < limits.min else high} does not fit {self.dtype} in "
                    f"{self.prefix}.bin; build it with a wider type"
                )
        return given.astype(self.dtype).reshape(-1)

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
            raise DataError(f"a sequence of {int(np.max(lengths)):,} tokens; the format holds 2^31")
        if len(lengths) and int(np.min(lengths)) < 0:
            raise DataError(f"a sequence of {int(np.min(lengths))} tokens")
        if self._modes is not None:
            modes = [0] * len(lengths) if modes is None else modes
            if len(modes) != len(lengths):
                raise DataError(f"{len(modes)} modes for {len(lengths)} sequences")
            self._modes.frombytes(np.asarray(modes, np.int8).tobytes())
        self._bin.write(tokens.data)
        self.tokens += len(tokens)
        self._lengths.frombytes(np.asarray(lengths, np.int32).tobytes())
