"""Whether a dataset is what its index and its manifest say."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import DataError
from ..files import Digests
from ..indexed.reader import IndexedDataset
from ..sources.block_cache import StorageCache
from ..sources.remote import read_blocks
from ..sources.storage import stat
from .manifest import Counts, count, damage_named, read_manifest


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
            vocab_size = int(manifest["tokenizer"]["vocab_size"])
            _check_size(f"{prefix}.bin", counts.tokens * dataset.dtype.itemsize, files["bin"])
            tokens = _Tokens(dataset)
            _check_content(f"{prefix}.bin", tokens.read(), files["bin"])
            _check_size(f"{prefix}.idx", stat(f"{prefix}.idx").size, files["idx"])
            _check_content(f"{prefix}.idx", read_blocks(f"{prefix}.idx"), files["idx"])
    if manifest["counts"] != asdict(counts):
        raise DataError(f"{prefix} holds {counts}, its manifest says {manifest['counts']}")
    if tokens.highest >= vocab_size:
        raise DataError(
            f"{prefix}.bin holds token {tokens.highest}, the vocabulary has {vocab_size}"
        )
    return Verified(counts, manifest=True)


class _Tokens:
    """A `.bin` that is read once for its bytes and its highest token."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self.highest = -1

    def read(self) -> Iterator[memoryview]:
        for tokens in self._dataset.scan():
            self.highest = max(self.highest, int(tokens.max()))
            yield tokens.data.cast("B")


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
