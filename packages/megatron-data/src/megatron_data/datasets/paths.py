"""Parses `--data-path` and the files of Megatron's other data options."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_data.datasets.split_names import SPLITS, SplitName
from megatron_data.errors import DataError
from megatron_data.files import AtomicFile, read_json, read_text
from megatron_data.sources.streams import split_suffix

_LINES = (".jsonl", ".json")


class Blend(NamedTuple):
    """Datasets and their weights.

    Attributes:
        prefixes: Paths of datasets without `.bin` or `.idx`.
        weights: One weight per prefix, or None to weight datasets by their size.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_data_path(values: str | os.PathLike[str] | Sequence[str] | Blend) -> Blend:
    """Returns the blend of a `--data-path` list: prefixes, or alternating weights and prefixes.

    A list of odd length contains only prefixes. A list of even length contains weight, prefix,
    weight, prefix, … if the first word of each pair is a number, and only prefixes if no first
    word is a number. A `Blend` is returned as it is.

    Raises:
        DataError: The list is empty, or only some pairs have a number.
    """
    if isinstance(values, Blend):
        return values
    if isinstance(values, str | os.PathLike):
        return Blend((os.fspath(values).strip(),), None)
    words = [value.strip() for value in values]
    if not words:
        raise DataError("--data-path is empty; name at least one dataset")
    numbers = [_number(word) for word in words[::2]]
    if len(words) % 2 or all(number is None for number in numbers):
        return Blend(tuple(words), None)
    weights = tuple(number for number in numbers if number is not None)
    if len(weights) < len(numbers):
        raise DataError(
            f"--data-path {' '.join(words)}: give a weight before every prefix, or before none"
        )
    return Blend(tuple(words[1::2]), weights)


def is_conversation_file(path: str) -> bool:
    """Returns whether a path names a file of JSON lines: `.jsonl` or `.json`, or compressed."""
    return split_suffix(path)[0] in _LINES


def read_data_args(path: str | os.PathLike[str]) -> Blend:
    """Reads a `--data-args-path` file: a `--data-path` list separated by white space.

    Raises:
        DataError: The file does not exist, or its list is invalid.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"--data-args-path {path} does not exist")
    return parse_data_path(read_text(path).split())


def write_data_args(path: str | os.PathLike[str], blend: Blend) -> None:
    """Writes a blend as a `--data-args-path` file, one dataset per line.

    Raises:
        DataError: A prefix contains white space.
    """
    for prefix in blend.prefixes:
        if prefix.split() != [prefix]:
            raise DataError(
                f"{prefix!r} contains white space, which separates prefixes in {path}; rename it"
            )
    weights = [""] * len(blend.prefixes) if blend.weights is None else map(repr, blend.weights)
    lines = zip(weights, blend.prefixes, strict=True)
    with AtomicFile(path) as file:
        file.write(
            "".join(f"{weight} {prefix}".strip() + "\n" for weight, prefix in lines).encode()
        )


def read_per_split_data_args(path: str | os.PathLike[str]) -> dict[SplitName, Blend | None]:
    """Reads a `--per-split-data-args-path` file: `{"train": [...], "valid": [...], "test": [...]}`.

    A value may also be a string, separated by white space.

    Raises:
        DataError: The file does not exist or is not JSON, or a key is not a split.
    """
    if not Path(path).is_file():
        raise DataError(f"--per-split-data-args-path {path} does not exist")
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object with the keys {', '.join(SPLITS)}")
    return parse_per_split(content, where=str(path))


def read_data_path_changes(
    path: str | os.PathLike[str],
) -> list[tuple[int, str | Sequence[str]]]:
    """Reads a `--data-path-changes` file: data paths that apply from a sample on.

    The file is a JSON list of objects such as `{"from_sample": 80000, "data_path": ["0.7", "a",
    "0.3", "b"]}`. A data path may also be a string, separated by white space.

    Returns:
        Pairs of the first sample and the data path.

    Raises:
        DataError: The file does not exist, or is not such a list.
    """
    if not Path(path).is_file():
        raise DataError(f"--data-path-changes {path} does not exist")
    content = read_json(path)
    changes: list[tuple[int, str | Sequence[str]]] = []
    for entry in content if isinstance(content, list) else [content]:
        match entry:
            case {"from_sample": int(first), "data_path": str(words)} if len(entry) == 2:
                changes.append((first, words.split()))
            case {"from_sample": int(first), "data_path": [*words]} if len(entry) == 2:
                changes.append((first, [str(word) for word in words]))
            case _:
                raise DataError(
                    f"{path}: give entries such as "
                    '{"from_sample": 80000, "data_path": ["0.7", "a", "0.3", "b"]}'
                )
    return changes


def parse_per_split(
    content: Mapping[str, str | Sequence[str] | None], where: str = "the data of each split"
) -> dict[SplitName, Blend | None]:
    """Returns the blend of each split. The blend of a missing or empty value is None.

    Args:
        content: Maps splits to `--data-path` lists, or to strings separated by white space.
        where: Place that errors name. Defaults to "the data of each split".

    Raises:
        DataError: A key is not a split, or a value is invalid.
    """
    unknown = sorted(set(content) - set(SPLITS))
    if unknown:
        raise DataError(f"{where}: {unknown[0]!r} is not one of {', '.join(SPLITS)}")
    blends: dict[SplitName, Blend | None] = {}
    for split in SPLITS:
        value = content.get(split)
        words = value.split() if isinstance(value, str) else value
        if words is not None and not _are_words(words):
            raise DataError(
                f"{where}: {split} is {value!r:.100}; give a string or a list of strings, such as "
                '["0.7", "a", "0.3", "b"]'
            )
        blends[split] = parse_data_path(words) if words else None
    return blends


def _are_words(words: object) -> bool:
    if isinstance(words, Blend):
        return True
    return isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
