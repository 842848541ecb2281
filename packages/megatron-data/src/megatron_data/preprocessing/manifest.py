"""The record that preprocessing leaves beside a dataset, `PREFIX.meta.json`.

Readers of the `.bin/.idx` pair ignore it; `verify` compares the files with it.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import DataError
from ..files import file_sha256, read_json, write_json
from ..indexed.builder import WrittenDataset
from ..indexed.format import bin_path, idx_path
from ..indexed.reader import IndexedDataset
from ..sources.protocol import Source
from ..tokenizers.protocol import Tokenizer

FORMAT = "megatron-data manifest 1"


@dataclass(frozen=True)
class Counts:
    """What a dataset holds."""

    documents: int
    empty_documents: int
    sequences: int
    tokens: int


def manifest_path(prefix: str | os.PathLike[str]) -> Path:
    """`PREFIX.meta.json`."""
    return Path(f"{os.fspath(prefix)}.meta.json")


def write_manifest(
    prefix: str,
    *,
    key: str,
    append_eod: bool,
    dtype: str,
    tokenizer: Tokenizer,
    sources: list[Source],
    written: WrittenDataset,
    counts: Counts,
) -> None:
    """Write the manifest: the same input and options give the same bytes, on any machine."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "writer": f"megatron-data {__version__}",
        "json_key": key,
        "append_eod": append_eod,
        "dtype": dtype,
        "counts": asdict(counts),
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "fingerprint": tokenizer.fingerprint,
        },
        "sources": [source.record() for source in sources],
        "files": {
            name: {"bytes": file.bytes, "sha256": file.sha256}
            for name, file in (("bin", written.bin), ("idx", written.idx))
        },
    }
    write_json(manifest_path(prefix), content)


def read_manifest(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a dataset, or None if it has none (datasets that Megatron wrote).

    Raises:
        DataError: a file of that name that is not a manifest this package knows.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is not a manifest of the format {FORMAT!r}")
    return content


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


def verify(prefix: str | os.PathLike[str]) -> Verified:
    """Check a dataset's structure, and its sizes, counts and digests against the manifest.

    Raises:
        DataError: the first thing found wrong.
    """
    prefix = os.fspath(prefix)
    manifest = read_manifest(prefix)
    with IndexedDataset(prefix) as dataset:
        dataset.check()
        counts = count(dataset)
        highest = int(dataset.tokens.max()) if len(dataset.tokens) else -1
    if manifest is None:
        return Verified(counts, manifest=False)
    try:
        for path, name in ((bin_path(prefix), "bin"), (idx_path(prefix), "idx")):
            _check_file(path, manifest["files"][name])
        if manifest["counts"] != asdict(counts):
            raise DataError(f"{prefix} holds {counts}, its manifest says {manifest['counts']}")
        vocab_size = manifest["tokenizer"]["vocab_size"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{manifest_path(prefix)} is incomplete: {error} is missing") from None
    if highest >= vocab_size:
        raise DataError(f"{prefix}.bin holds token {highest}, the vocabulary has {vocab_size}")
    return Verified(counts, manifest=True)


def count(dataset: IndexedDataset) -> Counts:
    """Documents, sequences and tokens of a dataset."""
    bounds = dataset.document_indices
    return Counts(
        documents=dataset.documents,
        empty_documents=int((bounds[1:] == bounds[:-1]).sum()),
        sequences=len(dataset),
        tokens=len(dataset.tokens),
    )


def _check_file(path: Path, recorded: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != recorded["bytes"]:
        raise DataError(f"{path} has {size:,} bytes, its manifest says {recorded['bytes']:,}")
    if file_sha256(path) != recorded["sha256"]:
        raise DataError(
            f"{path} is not the file its manifest describes: same size, other content; copy it "
            "again or preprocess again"
        )
