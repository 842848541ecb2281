"""Whether a dataset is what its index and its manifest say."""

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
    """What `verify` found in order.

    Attributes:
        counts: what the dataset holds.
        has_manifest: whether there was a manifest to compare with; without one only the structure
            could be checked.
    """

    counts: Counts
    has_manifest: bool


def verify(
    prefix: str | os.PathLike[str], storage: StorageCache | None = None
) -> VerificationReport:
    """Checks a dataset's structure, and its sizes, counts and digests against the manifest.

    Every file is read once, block by block; of a URL past the cache, as it lies there.

    Args:
        prefix: path of the pair without `.bin` or `.idx`, or a URL that fsspec opens.
        storage: the cache for the index of a URL.

    Raises:
        DataError: the first thing found wrong.
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
            raise DataError(f"{prefix}.bin holds token {found}, {known}")
    if manifest.get("conversations"):
        check_mask(prefix.removesuffix(LOSS_SUFFIX))
    return VerificationReport(counts, has_manifest=True)


def _check_counts(prefix: str, recorded: dict[str, Any], counts: Counts, numbers: int) -> None:
    """Compares counts; older manifests count the numbers that images are made of as tokens."""
    found = counts if "images" in recorded else replace(counts, tokens=numbers, images=0)
    if recorded != found.to_json():
        raise DataError(f"{prefix} holds {found.to_json()}, its manifest says {recorded}")


class _Tokens:
    """A `.bin` that is read once for its bytes and the bounds of the tokens of its texts."""

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
        """Every image that begins among these tokens says first how it is filled up."""
        starts, itemsize = self._dataset.sequence_pointers, self._dataset.dtype.itemsize
        bounds = np.array([begin, begin + len(tokens)]) * itemsize
        first, last = np.searchsorted(starts, bounds).tolist()
        images = first + np.flatnonzero(modes[first:last] == IMAGE_MODE)
        fills = tokens[starts[images] // itemsize - begin]
        wrong = np.flatnonzero((fills < 0) | (fills > MAX_PADDING_BYTES))
        if len(wrong):
            raise DataError(
                f"{self._dataset.prefix}: sequence {images[wrong[0]]} holds no image: it begins "
                f"with {fills[wrong[0]]}, not with 0 to {MAX_PADDING_BYTES}"
            )


def _recorded(prefix: str, name: str, files: dict[str, Any]) -> WrittenFile:
    """Returns what a manifest says of a file; one without blocks is older than these."""
    file = files[name]
    blocks = list(file.get("blocks", []))
    return WrittenFile(f"{prefix}.{name}", int(file["bytes"]), file["sha256"], blocks)


def _check_size(recorded: WrittenFile, size: int) -> None:
    if size != recorded.bytes:
        raise DataError(f"{recorded.path} has {size:,} bytes, its manifest says {recorded.bytes:,}")


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
        f"{recorded.path} is not the file its manifest describes: same size, other content{where}; "
        "copy it again or preprocess again"
    )
