"""Compares the tokenizers of datasets by the fingerprints in their manifests."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_data.errors import TokenizerMismatchError
from megatron_data.preprocessing.manifest import read_manifest
from megatron_data.tokenizers.protocol import ExtendedTokenizer, Tokenizer

_SHOWN = 19  # `sha256:` and 12 digits


def fingerprint_in(manifest: Mapping[str, Any] | None) -> str | None:
    """Returns the fingerprint of the tokenizer in a manifest, or None if there is none."""
    found = (manifest or {}).get("tokenizer", {}).get("fingerprint")
    return found if isinstance(found, str) else None


def recorded_fingerprints(prefixes: Iterable[str | os.PathLike[str]]) -> dict[str, str | None]:
    """Reads the fingerprints of the tokenizers of datasets from their manifests.

    Returns:
        The fingerprint by prefix; None for a dataset without a manifest.

    Raises:
        DataError: A manifest is damaged, or a URL cannot be read.
    """
    names = dict.fromkeys(os.fspath(prefix) for prefix in prefixes)
    return {name: fingerprint_in(read_manifest(name)) for name in names}


def compare_fingerprints(
    recorded: Mapping[str, str | None], tokenizer: Tokenizer | None = None
) -> None:
    """Raises an error if datasets were made with different tokenizers, or not with `tokenizer`.

    A tokenizer with added special tokens matches datasets made without them, because all other
    tokens keep their ids.

    Args:
        recorded: Fingerprints by prefix; None is not compared.
        tokenizer: The tokenizer of a run. If None, the datasets are compared with one another.

    Raises:
        TokenizerMismatchError: Two fingerprints differ.
    """
    known = {name: found for name, found in recorded.items() if found is not None}
    if tokenizer is not None:
        accepted = {tokenizer.fingerprint}
        if isinstance(tokenizer, ExtendedTokenizer):
            accepted.add(tokenizer.base_fingerprint)
        for name, found in known.items():
            if found not in accepted:
                raise TokenizerMismatchError(
                    f"{name} was made with tokenizer {found[:_SHOWN]}, not with "
                    f"{tokenizer.fingerprint[:_SHOWN]}; give the tokenizer that it was made with"
                )
        return
    for name, found in known.items():
        first, other = next(iter(known.items()))
        if found != other:
            raise TokenizerMismatchError(
                f"{name} was made with tokenizer {found[:_SHOWN]}, {first} with "
                f"{other[:_SHOWN]}; preprocess one of them again"
            )
