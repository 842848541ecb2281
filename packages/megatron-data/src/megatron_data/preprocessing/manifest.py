"""The manifest `PREFIX.meta.json`, which records how a dataset was made.

Readers of `.bin` and `.idx` ignore it; `verify` compares the files with it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_data._version import __version__
from megatron_data.errors import DataError
from megatron_data.files import BLOCK_BYTES, parse_json, write_json
from megatron_data.indexed.builder import WrittenDataset
from megatron_data.indexed.images import count_images
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.plural import plural
from megatron_data.preprocessing.origins import Origins
from megatron_data.preprocessing.protocol import ChunkEncoder
from megatron_data.sources.protocol import Source
from megatron_data.sources.remote import read_if_there

FORMAT = "megatron-data manifest 1"

LOSS_SUFFIX = "_loss"
"""Suffix of the loss mask of a dataset of conversations."""

_PARTS: dict[str, type] = {"counts": dict, "tokenizer": dict, "sources": list, "files": dict}


@dataclass(frozen=True)
class Counts:
    """Counts of a dataset.

    Attributes:
        documents: Number of documents.
        empty_documents: Documents without a sequence.
        sequences: Number of sequences: texts, or their sentences, and images.
        tokens: Tokens of all texts.
        images: Sequences of a multimodal dataset that are images.
        image_bytes: Bytes of the images in the `.bin`.
    """

    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    images: int = 0
    image_bytes: int = 0

    @property
    def summary(self) -> str:
        """The counts as text: `2 documents, 1,000 tokens`."""
        parts = [plural(self.documents, "document"), plural(self.tokens, "token")]
        if self.images:
            parts.append(f"{plural(self.images, 'image')} ({self.image_bytes:,} bytes)")
        return ", ".join(parts)

    def to_json(self) -> dict[str, int]:
        """Returns the counts for a manifest, without those of images if there are none."""
        named = asdict(self)
        if not self.images:
            del named["images"], named["image_bytes"]
        return named


def manifest_name(prefix: str | os.PathLike[str]) -> str:
    """Returns `PREFIX.meta.json` for a path or a URL."""
    return f"{os.fspath(prefix)}.meta.json"


def manifest_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns the path `PREFIX.meta.json` of a local dataset."""
    return Path(manifest_name(prefix))


@dataclass(frozen=True)
class Skipped:
    """Counts of skipped documents.

    Attributes:
        documents: Number of skipped documents; the lost rest of a damaged file counts as one.
        kinds: Number per kind; see `megatron_data.sources.protocol.KINDS`.
    """

    documents: int
    kinds: dict[str, int]


def describe_output(
    encoder: ChunkEncoder,
    number: int,
    *,
    sources: Sequence[Source],
    skipped: Skipped,
    tallies: Mapping[str, int],
) -> dict[str, Any]:
    """Returns the part of a manifest that describes how an output of an encoder was made."""
    tokenizer, output = encoder.tokenizer, encoder.outputs[number]
    return {
        **encoder.options(number),
        **({"tallies": dict(sorted(tallies.items()))} if tallies else {}),
        "dtype": str(output.dtype),
        **({} if output.values is None else {"values": output.values}),
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "fingerprint": tokenizer.fingerprint,
        },
        "skipped": asdict(skipped),
        "sources": [source.record() | encoder.reader_options for source in sources],
    }


def write_manifest(
    prefix: str,
    description: dict[str, Any],
    *,
    written: WrittenDataset,
    counts: Counts,
    origins: Origins | None,
) -> None:
    """Writes the manifest; the same input and options give the same bytes on any machine."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "writer": f"megatron-data {__version__}",
        **description,
        "counts": counts.to_json(),
        "block_bytes": BLOCK_BYTES,
        "files": {
            name: {"bytes": file.bytes, "sha256": file.sha256, "blocks": file.blocks}
            for name, file in (("bin", written.bin), ("idx", written.idx))
        },
    }
    if origins is not None:
        content["chunks"] = origins.to_json()
    write_json(manifest_path(prefix), content, indent=False)


def read_origins(prefix: str, manifest: dict[str, Any]) -> Origins | None:
    """Returns the map of chunks in a manifest; None if an older version wrote it without a map.

    Raises:
        DataError: The map is damaged.
    """
    if not isinstance(manifest.get("chunks"), dict):
        return None
    with manifest_errors(prefix):
        counts = manifest["counts"]
        documents, numbers = counts["documents"], counts["tokens"]
        if image_bytes := counts.get("image_bytes"):
            numbers += image_bytes // np.dtype(manifest["dtype"]).itemsize
    try:
        return Origins.from_json(manifest["chunks"], documents, numbers)
    except DataError as error:
        raise DataError(f"{manifest_name(prefix)}: {error}") from None


def read_manifest(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Reads the manifest of a dataset; returns None if there is none, as for Megatron's datasets.

    Raises:
        DataError: The file is not a manifest of a known format, or a URL cannot be read.
    """
    path = manifest_name(prefix)
    data = read_if_there(path)
    if data is None:
        return None
    content = parse_json(data, path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is not a manifest of the format {FORMAT!r}")
    for name, kind in _PARTS.items():
        if not isinstance(content.get(name), kind):
            raise DataError(f"{path} is incomplete: {name} is missing; preprocess the text again")
    return content


@contextmanager
def manifest_errors(prefix: str | os.PathLike[str]) -> Iterator[None]:
    """Raises `DataError` for a manifest that lacks a value or has one of another type."""
    try:
        yield
    except DataError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{manifest_name(prefix)} is damaged ({error}); preprocess the text again"
        ) from None


def check_mask(prefix: str | os.PathLike[str]) -> None:
    """Compares the manifests of conversations and of their mask, if both exist.

    A mask of another run may have the same lengths: of another template or loss, or of lines that
    have changed.

    Raises:
        DataError: Another run made the mask.
    """
    tokens, mask = read_manifest(prefix), read_manifest(f"{os.fspath(prefix)}{LOSS_SUFFIX}")
    if tokens is None or mask is None:
        return
    for name in ("conversations", "tokenizer", "counts", "sources", "chunks"):
        if tokens.get(name) != mask.get(name):
            raise DataError(
                f"{prefix}{LOSS_SUFFIX} is not the mask of {prefix}: another run made it (their "
                f"{name} differ); tokenize the conversations again"
            )


def count_dataset(dataset: IndexedDataset) -> Counts:
    """Counts documents, sequences, tokens and images of a dataset from its index."""
    bounds, modes = dataset.document_indices, dataset.sequence_modes
    images = image_numbers = 0
    if modes is not None:
        images, image_numbers = count_images(dataset.sequence_lengths, modes)
    return Counts(
        documents=dataset.num_documents,
        empty_documents=int((bounds[1:] == bounds[:-1]).sum()),
        sequences=len(dataset),
        tokens=dataset.num_tokens - image_numbers,
        images=images,
        image_bytes=image_numbers * dataset.dtype.itemsize,
    )
