"""Whether a dataset is what its index and its manifest say."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import Digests
from ..indexed.images import IMAGE_MODE, MOST_FILL, TEXT_MODE
from ..indexed.reader import IndexedDataset
from ..sources.block_cache import StorageCache
from ..sources.remote import read_blocks
from ..sources.storage import stat
from .manifest import LOSS, Counts, check_mask, count, damage_named, read_manifest


@dataclass(frozen=True)
class Verified:
    """What `verify` found in order.

    Attributes:
        counts: what the dataset holds.
        manifest: whether there was a manifest to compare with; without one only the structure
            could be checked.
    """

    counts: Counts
    manifest: bool


def verify(prefix: str | os.PathLike[str], storage: StorageCache | None = None) -> Verified:
    """Check a dataset's structure, and its sizes, counts and digests against the manifest.

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
        counts = count(dataset)
        if manifest is None:
            return Verified(counts, manifest=False)
        with damage_named(prefix):
            files = manifest["files"]
            values = manifest.get("values")
            limit = int(manifest["tokenizer"]["vocab_size"] if values is None else values)
            _check_size(f"{prefix}.bin", counts.tokens * dataset.dtype.itemsize, files["bin"])
            tokens = _Tokens(dataset)
            _check_content(f"{prefix}.bin", tokens.read(), files["bin"])
            _check_size(f"{prefix}.idx", stat(f"{prefix}.idx").size, files["idx"])
            _check_content(f"{prefix}.idx", read_blocks(f"{prefix}.idx"), files["idx"])
    if manifest["counts"] != asdict(counts):
        raise DataError(f"{prefix} holds {counts}, its manifest says {manifest['counts']}")
    if tokens.highest >= limit:
        known = "the vocabulary has" if values is None else "values are below"
        raise DataError(f"{prefix}.bin holds token {tokens.highest}, {known} {limit}")
    if manifest.get("conversations"):
        check_mask(prefix.removesuffix(LOSS))
    return Verified(counts, manifest=True)


class _Tokens:
    """A `.bin` that is read once for its bytes and the highest token of its texts."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self._begins = dataset.sequence_pointers // dataset.dtype.itemsize
        self.highest = -1

    def read(self) -> Iterator[memoryview]:
        start = 0
        for tokens in self._dataset.scan():
            texts = self._texts(tokens, start)
            self.highest = max(self.highest, int(texts.max()) if len(texts) else -1)
            start += len(tokens)
            yield tokens.data.cast("B")

    def _texts(self, tokens: NDArray[Any], start: int) -> NDArray[Any]:
        """Those that are no images, each of which says first how it is filled up."""
        modes = self._dataset.sequence_modes
        if modes is None:
            return tokens
        first = int(np.searchsorted(self._begins, start, side="right")) - 1
        last = int(np.searchsorted(self._begins, start + len(tokens)))
        begins, modes = self._begins[first:last] - start, modes[first:last]
        images = np.flatnonzero((modes == IMAGE_MODE) & (begins >= 0))
        wrong = np.flatnonzero((tokens[begins[images]] < 0) | (tokens[begins[images]] > MOST_FILL))
        if len(wrong):
            number = int(images[wrong[0]])
            raise DataError(
                f"{self._dataset.prefix}: sequence {first + number} holds no image: it begins with "
                f"{tokens[begins[number]]}, not with 0 to {MOST_FILL}"
            )
        lengths = np.diff(np.append(np.maximum(begins, 0), len(tokens)))
        texts: NDArray[Any] = tokens[np.repeat(modes == TEXT_MODE, lengths)]
        return texts


def _check_size(path: str, size: int, recorded: dict[str, Any]) -> None:
    if size != recorded["bytes"]:
        raise DataError(f"{path} has {size:,} bytes, its manifest says {recorded['bytes']:,}")


def _check_content(
    path: str, content: Iterator[bytes] | Iterator[memoryview], recorded: dict[str, Any]
) -> None:
    digests = Digests()
    for data in content:
        digests.update(memoryview(data))
    if digests.sha256 == recorded["sha256"]:
        return
    pairs = enumerate(zip(digests.blocks, recorded.get("blocks", []), strict=False))
    wrong = [number for number, (found, wanted) in pairs if found != wanted]
    where = ""
    if wrong:
        where = (
            f" ({len(wrong)} of {len(digests.blocks)} blocks of 64 MiB, the first is {wrong[0]})"
        )
    raise DataError(
        f"{path} is not the file its manifest describes: same size, other content{where}; copy it "
        "again or preprocess again"
    )
