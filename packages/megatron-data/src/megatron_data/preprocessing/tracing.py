"""Finds the source file, line and byte of a training token."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_data.errors import DataError
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.preprocessing.manifest import (
    manifest_errors,
    manifest_name,
    read_manifest,
    read_origins,
)
from megatron_data.preprocessing.origins import Origin, Origins
from megatron_data.sources.block_cache import StorageCache
from megatron_data.sources.opening import reopen
from megatron_data.sources.protocol import (
    MAX_DOCUMENT_BYTES,
    Fault,
    Item,
    Row,
    Span,
    SupportsImagePairs,
    SupportsRows,
)


@dataclass(frozen=True)
class TraceReport:
    """The source of a document.

    Attributes:
        document: Index of the document in the dataset.
        first_token: Index of its first token in the dataset.
        tokens: Number of its tokens.
        path: Path of the source, or of a file in a folder of text files.
        span: Range of the source chunk that holds the document.
        number: Its line or row, from 1; None for a text file or if unknown.
        offset: Its first byte in the uncompressed file; None if the file has no lines or if
            unknown.
        size: Its size in the source in bytes; None if unknown.
        inexact_reason: Why only the source chunk is known; None if the location is exact.
    """

    document: int
    first_token: int
    tokens: int
    path: str
    span: Span
    number: int | None = None
    offset: int | None = None
    size: int | None = None
    inexact_reason: str | None = None


def trace(
    prefix: str | os.PathLike[str],
    token: int | None = None,
    *,
    document: int | None = None,
    storage: StorageCache | None = None,
    allow_http: bool = False,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> TraceReport:
    """Finds the source of a token or document of a dataset with a manifest.

    Reads the source chunk again and compares it with its digest in the manifest. If this is
    impossible, the result has the range of the chunk and the reason.

    Args:
        prefix: Path of the dataset without `.bin` or `.idx`, or a URL that fsspec opens.
        token: Index of the token in the `.bin`.
        document: Index of the document, instead of a token.
        storage: Cache for the index of a URL.
        allow_http: Whether to read a source from a web server that the manifest names. Local files
            and object storage are always read.
        max_document_bytes: Largest size of a document of the source in bytes. A lower limit in the
            manifest takes precedence. Give at least the limit with which the dataset was made.

    Raises:
        DataError: The token or document does not exist, or the dataset has no map to its sources.
    """
    prefix = os.fspath(prefix)
    if (token is None) == (document is None):
        raise DataError("give either a token or a document")
    with IndexedDataset(prefix, storage) as dataset:
        manifest, origins = _record_of(prefix)
        number = _document_of(dataset, token) if document is None else document
        if not 0 <= number < dataset.num_documents:
            raise DataError(
                f"{prefix} has documents 0 to {dataset.num_documents - 1:,}, not {number:,}"
            )
        first, last = dataset.document_indices[number : number + 2]
        before, end = dataset.tokens_before(np.array([first, last])).tolist()
    with manifest_errors(prefix):
        origin = origins.find(number)
        source = manifest["sources"][origin.source]
        wanted = number - origin.document + origin.skip
        limits = _Limits(allow_http, max_document_bytes)
        found = _look_up(source, origin, wanted, limits)
    return TraceReport(number, before, end - before, **found)


def _record_of(prefix: str) -> tuple[dict[str, Any], Origins]:
    """Returns a dataset's manifest, and the map of chunks in it."""
    path, manifest = manifest_name(prefix), read_manifest(prefix)
    if manifest is None:
        raise DataError(
            f"{prefix} has no manifest {path}, so its sources are unknown; copy the manifest "
            "beside it, or preprocess the text again"
        )
    origins = read_origins(prefix, manifest)
    if origins is None:
        raise DataError(
            f"{path} has no map of chunks, so the sources of {prefix} are unknown; preprocess the "
            "text again"
        )
    return manifest, origins


def _document_of(dataset: IndexedDataset, token: int | None) -> int:
    total = dataset.num_tokens
    if token is None or not 0 <= token < total:
        raise DataError(f"{dataset.prefix} has tokens 0 to {total - 1:,}, not {token}")
    byte = token * dataset.dtype.itemsize
    sequence = int(np.searchsorted(dataset.sequence_pointers, byte, side="right")) - 1
    return int(np.searchsorted(dataset.document_indices, sequence, side="right")) - 1


class _Limits(NamedTuple):
    """The limits that a user sets: arguments of `trace`."""

    allow_http: bool
    max_document_bytes: int

    def max_bytes_of(self, source: dict[str, Any]) -> int:
        """Returns the largest size of a document: the lower limit of manifest and user."""
        recorded, limit = source["max_document_bytes"], self.max_document_bytes
        return limit if recorded is None else min(recorded, limit)


def _look_up(
    source: dict[str, Any], origin: Origin, wanted: int, limits: _Limits
) -> dict[str, Any]:
    """Reads a source chunk again and returns the location of its document with index `wanted`."""
    path, max_bytes = source["path"], limits.max_bytes_of(source)
    try:
        chunk = reopen(source, limits.allow_http).chunk_at(origin.span, max_bytes)
    except (DataError, OSError) as error:
        return {"path": path, "span": origin.span, "inexact_reason": str(error)}
    if not chunk.digest.startswith(origin.digest):
        return {"path": path, "span": origin.span, "inexact_reason": f"{path} has changed since"}
    if source.get("objects") and isinstance(chunk, SupportsRows):
        found: Iterator[Item | Row | Fault] = chunk.rows(max_bytes)
    elif source.get("images") and isinstance(chunk, SupportsImagePairs):
        found = chunk.pairs(source["json_keys"], max_bytes)
    else:
        found = chunk.items(source["json_keys"], max_bytes)
    items = [item for item in found if not isinstance(item, Fault)]
    refused = set(origin.refused)
    kept = [item for position, item in enumerate(items) if position not in refused]
    return {"span": origin.span, **_place(path, chunk.fault(kept[wanted], "", ""), kept[wanted])}


def _place(path: str, named: Fault, item: Item | Row) -> dict[str, Any]:
    return {
        "path": named.path or path,
        "number": named.number,
        "offset": named.offset,
        "size": item.size,
    }
