"""Checks a dataset against its index and its manifest."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.files import Digests
from megatron_data.indexed.builder import WrittenFile
from megatron_data.indexed.images import IMAGE_MODE, MAX_PADDING_BYTES, text_mask
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.preprocessing.manifest import (
    LOSS_SUFFIX,
    Counts,
    check_mask,
    count_dataset,
    manifest_errors,
    read_manifest,
)
from megatron_data.sources.block_cache import StorageCache
from megatron_data.sources.remote import read_blocks
from megatron_data.sources.storage import stat


@dataclass(frozen=True)
class VerificationReport:
    """The result of `verify` for a valid dataset.

    Attributes:
        counts: Counts of the dataset.
        has_manifest: Whether the dataset has a manifest; without one, only the structure is
            checked.
    """

    counts: Counts
    has_manifest: bool


def verify(
    prefix: str | os.PathLike[str], storage: StorageCache | None = None
) -> VerificationReport:
    """Checks the structure of a dataset, and its sizes, counts and digests against the manifest.

    Reads every file once, block by block. The files of a URL are read from the storage and not
    from the cache.

    Args:
        prefix: Path of the dataset without `.bin` or `.idx`, or a URL that fsspec opens.
        storage: Cache for the index of a URL.

    Raises:
        DataError: The dataset is invalid; the error names the first problem.
    """
    prefix = os.fspath(prefix)
    with IndexedDataset(prefix, storage) as dataset:
        manifest = read_manifest(prefix)
        dataset.check()
        counts = count_dataset(dataset)
        if manifest is None:
            return VerificationReport(counts, has_manifest=False)
        with manifest_errors(prefix):
            values = manifest.get("values")
            limit = int(manifest["tokenizer"]["vocab_size"] if values is None else values)
            data, index = (_recorded(prefix, name, manifest["files"]) for name in ("bin", "idx"))
        _check_size(data, dataset.num_tokens * dataset.dtype.itemsize)
        tokens = _Tokens(dataset)
        _check_content(data, tokens.read())
        _check_size(index, stat(index.path).size)
        _check_content(index, read_blocks(index.path))
        _check_counts(prefix, manifest["counts"], counts, dataset.num_tokens)
    for found in (tokens.lowest, tokens.highest):
        if not 0 <= found < limit:
            known = f"the vocabulary has {limit}" if values is None else f"values are below {limit}"
            raise DataError(f"{prefix}.bin holds token {found}, but {known}; preprocess again")
    if manifest.get("conversations"):
        check_mask(prefix.removesuffix(LOSS_SUFFIX))
    return VerificationReport(counts, has_manifest=True)


def _check_counts(prefix: str, recorded: dict[str, Any], counts: Counts, numbers: int) -> None:
    """Compares counts; older manifests count the int32 values of images as tokens."""
    found = counts if "images" in recorded else replace(counts, tokens=numbers, images=0)
    if recorded != found.to_json():
        raise DataError(
            f"{prefix} holds {found.to_json()}, but its manifest has {recorded}; preprocess again"
        )


class _Tokens:
    """Reads a `.bin` once, and records the smallest and largest token of its texts."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self.lowest = self.highest = 0

    def read(self) -> Iterator[memoryview]:
        begin = 0
        for tokens in self._dataset.scan():
            texts, end = tokens, begin + len(tokens)
            if self._dataset.sequence_modes is not None:
                self._check_images(tokens, begin, self._dataset.sequence_modes)
                texts = tokens[text_mask(self._dataset, begin, end)]
            if len(texts):
                self.lowest = min(self.lowest, int(texts.min()))
                self.highest = max(self.highest, int(texts.max()))
            begin = end
            yield tokens.data.cast("B")

    def _check_images(self, tokens: NDArray[Any], begin: int, modes: NDArray[np.int8]) -> None:
        """Checks that the first value of each image that starts in these tokens is its padding."""
        starts, itemsize = self._dataset.sequence_pointers, self._dataset.dtype.itemsize
        bounds = np.array([begin, begin + len(tokens)]) * itemsize
        first, last = np.searchsorted(starts, bounds).tolist()
        images = first + np.flatnonzero(modes[first:last] == IMAGE_MODE)
        fills = tokens[starts[images] // itemsize - begin]
        wrong = np.flatnonzero((fills < 0) | (fills > MAX_PADDING_BYTES))
        if len(wrong):
            raise DataError(
                f"{self._dataset.prefix}: sequence {images[wrong[0]]} is not an image: it begins "
                f"with {fills[wrong[0]]}, not with 0 to {MAX_PADDING_BYTES}"
            )


def _recorded(prefix: str, name: str, files: dict[str, Any]) -> WrittenFile:
    """Returns the record of a file in a manifest; older manifests have no blocks."""
    file = files[name]
    blocks = list(file.get("blocks", []))
    return WrittenFile(f"{prefix}.{name}", int(file["bytes"]), file["sha256"], blocks)


def _check_size(recorded: WrittenFile, size: int) -> None:
    if size != recorded.bytes:
        raise DataError(
            f"{recorded.path} has {size:,} bytes, but its manifest has {recorded.bytes:,}; copy it "
            "again or preprocess again"
        )


def _check_content(recorded: WrittenFile, content: Iterator[bytes] | Iterator[memoryview]) -> None:
    digests = Digests()
    for data in content:
        digests.update(memoryview(data))
    if digests.sha256 == recorded.sha256:
        return
    pairs = enumerate(zip(digests.blocks, recorded.blocks, strict=False))
    wrong = [number for number, (found, wanted) in pairs if found != wanted]
    where = ""
    if wrong:
        where = (
            f" ({len(wrong)} of {len(digests.blocks)} blocks of 64 MiB, the first is {wrong[0]})"
        )
    raise DataError(
        f"{recorded.path} differs from its manifest: same size, different content{where}; copy it "
        "again or preprocess again"
    )
