"""Comparing the tokenizer of a run with those that its corpora were made with."""

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
    """Refuses corpora that another tokenizer made: their tokens would be other text.

    Reads the manifest, `PREFIX.meta.json`, of every source of all splits. One line of warning
    names the sources that have none, such as those that Megatron wrote. Conversations in JSON lines
    have no tokens yet and are left out.

    Args:
        data_path: As in `build_gpt_datasets`.
        tokenizer: Of the run; None compares the sources with one another alone.
        data_path_changes: As in `build_gpt_datasets`.

    Raises:
        TokenizerMismatchError: A source was made with another tokenizer than the run's, or than
            another source.
        DataError: A damaged manifest, or a data path that is none.
    """
    paths = [data_path, *(path for _, path in data_path_changes)]
    names = [name for path in paths for name in _prefixes(path)]
    recorded = recorded_fingerprints(n for n in names if not is_conversation_file(n))
    compare_fingerprints(recorded, tokenizer)
    unknown = [name for name, found in recorded.items() if found is None]
    if unknown and (tokenizer is not None or len(recorded) > 1):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        _log.warning(
            "%s%s: no manifest (.meta.json) says which tokenizer made the corpus, so it cannot be "
            "compared with this run's",
            unknown[0],
            more,
        )


def _prefixes(data_path: DataPath) -> Iterator[str]:
    """Returns the sources that a data path names."""
    if not isinstance(data_path, Mapping):
        yield from parse_data_path(data_path).prefixes
        return
    for blend in parse_per_split(data_path).values():
        yield from blend.prefixes if blend else ()
