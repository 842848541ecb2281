"""Configuration files: YAML with one mapping for each section, and nothing unknown in it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_train._command import nearest
from megatron_train.config.options import Option
from megatron_train.config.values import Given, Values
from megatron_train.errors import TrainError

_ABOUT = "about"
"""Key of a file that is not a section: a text for its readers."""


def read_file(path: Path, options: Sequence[Option]) -> Values:
    """Read the settings in the YAML file ``path``.

    Raises:
        TrainError: the file is not YAML, is not made of sections, or holds a section, key or value
            that does not exist; the message names the file, the place and the nearest key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is not YAML: {error}") from error
    return parse_settings(text, str(path), options)


def parse_settings(text: str, name: str, options: Sequence[Option]) -> Values:
    """Read the settings in YAML ``text``, which errors and origins call ``name``."""
    document = _load(text, name)
    document.pop(_ABOUT, None)
    given: dict[str, Given] = {}
    for section, content in document.items():
        given.update(_read_section(name, str(section), content, options))
    return Values(given)


def about(text: str) -> str:
    """Return what a file says of itself under ``about``, in one line; empty if nothing."""
    return " ".join(str(_load(text, "recipe").get(_ABOUT, "")).split())


def _load(text: str, name: str) -> dict[Any, Any]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TrainError(f"{name} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise TrainError(
            f"{name} must hold sections such as `model:`, not {type(document).__name__}"
        )
    return document


def _read_section(
    path: str, section: str, content: Any, options: Sequence[Option]
) -> dict[str, Given]:
    known = {option.key: option for option in options}
    sections = list(dict.fromkeys(option.section for option in options))
    if section not in sections:
        home = [key for key in known if key.endswith("." + section)]
        near = f"; did you mean {home[0]}?" if home else nearest(section, sections)
        raise TrainError(
            f"{path}: unknown section {section!r}{near} (known: {', '.join(sections)})"
        )
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise TrainError(
            f"{path}: section {section!r} must hold `key: value` lines, got {content!r}"
        )
    given: dict[str, Given] = {}
    for name, value in content.items():
        key = f"{section}.{name}"
        if key not in known:
            raise TrainError(
                f"{path}: unknown key {key}{_nearest_key(key, str(name), list(known))}"
            )
        given[key] = Given(known[key].coerce(value, f"{path}: {key}"), f"{path}: {key}")
    return given


def _nearest_key(key: str, name: str, known: Sequence[str]) -> str:
    elsewhere = [other for other in known if other.split(".")[1] == name.replace("-", "_")]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else nearest(key, known)


def to_yaml(sections: dict[str, dict[str, Any]]) -> str:
    """Return ``sections`` as YAML text that `read_file` accepts."""
    plain = {
        section: {key: list(v) if isinstance(v, tuple) else v for key, v in content.items()}
        for section, content in sections.items()
        if content
    }
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=False, allow_unicode=True)
