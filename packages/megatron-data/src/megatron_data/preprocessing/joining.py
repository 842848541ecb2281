"""Merges datasets and splits a dataset, with their manifests and maps to the sources."""

import logging
import os
import reprlib
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from megatron_data.errors import DataError
from megatron_data.files import local_prefix
from megatron_data.indexed.builder import IndexedDatasetBuilder
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.plural import plural
from megatron_data.preprocessing.fingerprints import compare_fingerprints, fingerprint_in
from megatron_data.preprocessing.manifest import (
    Counts,
    count_dataset,
    manifest_errors,
    manifest_path,
    read_manifest,
    read_origins,
    write_manifest,
)
from megatron_data.preprocessing.origins import Origins
from megatron_data.sources.block_cache import StorageCache

_ROUNDING = 1e-6  # allowed error of the sum of shares, such as three of 0.3333333

_log = logging.getLogger("megatron_data")

_RECOMPUTED = ("format", "writer", "tallies", "counts", "block_bytes", "files", "chunks")


def merge(
    prefixes: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    storage: StorageCache | None = None,
) -> Counts:
    """Concatenates datasets into one.

    The result has a manifest with all sources and the combined map if all datasets have one.

    Args:
        prefixes: Paths of the datasets without suffix, or URLs that fsspec opens, in order.
        output_prefix: Path of the dataset to write.
        storage: Cache for the indices of URLs; their tokens are not cached.

    Returns:
        The counts of the result.

    Raises:
        DataError: A dataset is damaged, token types, modes or tokenizers differ, or no dataset is
            given.
    """
    names, output = [os.fspath(prefix) for prefix in prefixes], local_prefix(output_prefix)
    if not names:
        raise DataError("no dataset to merge")
    if output in names:
        raise DataError(f"{output} is one of the datasets to merge; give another output")
    manifests = [read_manifest(name) for name in names]
    made = {name: fingerprint_in(found) for name, found in zip(names, manifests, strict=True)}
    compare_fingerprints(made)
    with IndexedDataset(names[0], storage) as first:
        dtype, multimodal = first.dtype, first.sequence_modes is not None
    with IndexedDatasetBuilder(output, dtype, multimodal) as builder:
        for name in names:
            builder.add_index(name, storage)
        manifest_path(output).unlink(missing_ok=True)
        written = builder.finalize()
    known = [manifest for manifest in manifests if manifest is not None]
    counts = _counts(output)
    if len(known) < len(names):
        without_manifest = next(
            name for name, found in zip(names, manifests, strict=True) if not found
        )
        _log.warning("%s has no manifest, so none is written for %s", without_manifest, output)
        return counts
    origins, sources = [], 0
    for name, manifest in zip(names, known, strict=True):
        found = read_origins(name, manifest)
        if found is not None:
            origins.append((found, sources))
        sources += len(manifest["sources"])
    write_manifest(
        output,
        _joined(names, known),
        written=written,
        counts=counts,
        origins=Origins.concatenate(origins) if len(origins) == len(known) else None,
    )
    return counts


def split(
    prefix: str | os.PathLike[str],
    output_prefixes: Sequence[str | os.PathLike[str]],
    *,
    shares: Sequence[float] | None = None,
    documents: Sequence[int] | None = None,
    storage: StorageCache | None = None,
) -> list[Counts]:
    """Splits a dataset into several; the documents keep their order.

    Args:
        prefix: Path of the dataset without suffix, or a URL that fsspec opens.
        output_prefixes: Paths of the datasets to write.
        shares: Share of the documents of each output. Shares that do not sum to 1 are normalized,
            with a warning.
        documents: Number of documents of each output, instead of shares; the sum must be that of
            the dataset.
        storage: Cache for the index of a URL; its tokens are not cached.

    Returns:
        The counts of each output.

    Raises:
        DataError: The dataset is damaged, or the shares or numbers are invalid.
    """
    name, outputs = os.fspath(prefix), [local_prefix(output) for output in output_prefixes]
    if name in outputs or len(set(outputs)) < len(outputs):
        raise DataError("every output needs a different name, and not that of the dataset")
    manifest = read_manifest(name)
    origins = read_origins(name, manifest) if manifest else None
    made = []
    with IndexedDataset(name, storage) as dataset:
        dataset.check()
        ends = _ends(dataset.num_documents, len(outputs), shares, documents)
        for output, first, last in zip(outputs, [0, *ends], ends, strict=False):
            multimodal = dataset.sequence_modes is not None
            with IndexedDatasetBuilder(output, dataset.dtype, multimodal) as builder:
                builder.copy_documents(dataset, first, last)
                manifest_path(output).unlink(missing_ok=True)
                written = builder.finalize()
            counts = _counts(output)
            made.append(counts)
            if manifest is None:
                continue
            bounds = dataset.document_indices[[first, last]]
            start, end = dataset.tokens_before(bounds).tolist()
            part = origins.select(first, last, start, end) if origins is not None else None
            description = _description(manifest)
            write_manifest(output, description, written=written, counts=counts, origins=part)
    return made


def _ends(
    total: int, outputs: int, shares: Sequence[float] | None, documents: Sequence[int] | None
) -> list[int]:
    """Returns the end of each part as a document index."""
    given = shares if documents is None else documents
    if given is None or (shares is not None and documents is not None):
        raise DataError("give either shares or numbers of documents")
    if len(given) != outputs or not outputs:
        raise DataError(
            f"{plural(len(given), 'part')} for {plural(outputs, 'output')}; give one for each"
        )
    if wrong := [each for each in given if not 0 < each < inf]:
        raise DataError(f"a share or number of {wrong[0]}; give a positive number")
    if documents is not None and sum(documents) != total:
        raise DataError(
            f"the numbers of documents sum to {sum(documents):,}, but the dataset has {total:,}; "
            f"give numbers that sum to {total:,}"
        )
    cumulated = np.cumsum(given)
    ends = [round(float(at) / float(cumulated[-1]) * total) for at in cumulated]
    empty = [number for number, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a == b]
    if empty:
        raise DataError(
            f"part {empty[0] + 1} of {total:,} documents is empty; give it a larger share"
        )
    if shares is not None and abs(sum(shares) - 1) > _ROUNDING:
        normalized = ", ".join(f"{share / sum(shares):.2%}" for share in shares)
        _log.warning(
            "the shares sum to %g, not to 1; they are taken as %s", sum(shares), normalized
        )
    return ends


def _counts(prefix: str) -> Counts:
    with IndexedDataset(prefix) as dataset:
        return count_dataset(dataset)


def _description(manifest: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in _RECOMPUTED}


def _joined(names: Sequence[str], manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines manifests: null for different values, all sources, sums of skipped documents."""
    first = _description(manifests[0])
    made = {
        key: value if all(other.get(key) == value for other in manifests) else None
        for key, value in first.items()
    }
    kinds: Counter[str] = Counter()
    tallies: Counter[str] = Counter()
    for name, manifest in zip(names, manifests, strict=True):
        with manifest_errors(name):
            kinds.update(_numbers((manifest.get("skipped") or {}).get("kinds")))
            tallies.update(_numbers(manifest.get("tallies")))
    known = all(manifest.get("tallies") for manifest in manifests)
    return {
        **made,
        **({"tallies": dict(sorted(tallies.items()))} if known else {}),
        "tokenizer": first["tokenizer"],
        "skipped": {"documents": kinds.total(), "kinds": dict(sorted(kinds.items()))},
        "sources": [source for manifest in manifests for source in manifest["sources"]],
    }


def _numbers(given: Any) -> dict[str, int]:
    """Returns the counters of a manifest, or an empty dictionary.

    Raises:
        ValueError: A value is not a count below 2^53, the largest that JSON represents exactly.
    """
    numbers: dict[str, int] = dict(given or {})
    for key, value in numbers.items():
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise ValueError(f"{reprlib.repr(value)} is not a count of {reprlib.repr(key)}")
    return numbers
