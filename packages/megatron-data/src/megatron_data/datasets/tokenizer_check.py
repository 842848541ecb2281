"""Compares the tokenizer of a run with the tokenizers of its datasets."""

import logging
from collections.abc import Iterator, Mapping, Sequence

from megatron_data.datasets.build import DataPath
from megatron_data.datasets.paths import is_conversation_file, parse_data_path, parse_per_split
from megatron_data.preprocessing.fingerprints import compare_fingerprints, recorded_fingerprints
from megatron_data.tokenizers.protocol import Tokenizer

_log = logging.getLogger("megatron_data")


def check_tokenizer(
    data_path: DataPath,
    tokenizer: Tokenizer | None,
    *,
    data_path_changes: Sequence[tuple[int, DataPath]] = (),
) -> None:
    """Checks that all datasets were made with the tokenizer of the run.

    Reads the manifest, `PREFIX.meta.json`, of each dataset of all splits. Logs a warning about
    datasets without a manifest, such as those that Megatron wrote. Conversations in JSON lines are
    not tokenized yet and are ignored.

    Args:
        data_path: Data path; see `build_gpt_datasets`.
        tokenizer: Tokenizer of the run. None only compares the datasets with each other.
        data_path_changes: Later data paths; see `build_gpt_datasets`.

    Raises:
        TokenizerMismatchError: A dataset was made with another tokenizer than the run's, or than
            another dataset.
        DataError: A manifest is damaged, or the data path is invalid.
    """
    paths = [data_path, *(path for _, path in data_path_changes)]
    names = [name for path in paths for name in _prefixes(path)]
    recorded = recorded_fingerprints(n for n in names if not is_conversation_file(n))
    compare_fingerprints(recorded, tokenizer)
    without_manifest = [name for name, fingerprint in recorded.items() if fingerprint is None]
    if without_manifest and (tokenizer is not None or len(recorded) > 1):
        more = f" and {len(without_manifest) - 1} more" if len(without_manifest) > 1 else ""
        _log.warning(
            "%s%s: without a manifest (.meta.json), the tokenizer of the dataset cannot be "
            "compared with that of the run",
            without_manifest[0],
            more,
        )


def _prefixes(data_path: DataPath) -> Iterator[str]:
    """Yields the datasets of a data path."""
    if not isinstance(data_path, Mapping):
        yield from parse_data_path(data_path).prefixes
        return
    for blend in parse_per_split(data_path).values():
        yield from blend.prefixes if blend else ()
