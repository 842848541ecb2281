"""Which tokenizer datasets were made with, by the fingerprints in their manifests."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_data.errors import TokenizerMismatchError
from megatron_data.preprocessing.manifest import read_manifest
from megatron_data.tokenizers.protocol import ExtendedTokenizer, Tokenizer

_SHOWN = 19  # `sha256:` and 12 digits


def fingerprint_in(manifest: Mapping[str, Any] | None) -> str | None:
    """Returns the fingerprint of the tokenizer in a manifest, None where it says none."""
    found = (manifest or {}).get("tokenizer", {}).get("fingerprint")
    return found if isinstance(found, str) else None


def recorded_fingerprints(prefixes: Iterable[str | os.PathLike[str]]) -> dict[str, str | None]:
    """Reads from the manifests of datasets which tokenizers they were made with.

    Returns:
        By prefix the fingerprint of the tokenizer; None for a dataset that has no manifest.

    Raises:
        DataError: a damaged manifest; a URL that cannot be read.
    """
    names = dict.fromkeys(os.fspath(prefix) for prefix in prefixes)
    return {name: fingerprint_in(read_manifest(name)) for name in names}


def compare_fingerprints(
    recorded: Mapping[str, str | None], tokenizer: Tokenizer | None = None
) -> None:
    """Refuses datasets made with different tokenizers, or with another than `tokenizer`.

    A tokenizer to which special tokens were added goes with datasets made without them: all other
    tokens keep their numbers.

    Args:
        recorded: fingerprints by prefix; those that are None are not compared.
        tokenizer: of a run; None compares the datasets with one another alone.

    Raises:
        TokenizerMismatchError: two fingerprints differ.
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
