"""Configuration files: YAML with one mapping for each section; unknown keys are errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_train._command import nearest
from megatron_train.config.options import Option
from megatron_train.config.renamed_keys import RENAMED_KEYS
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, collect_errors, raise_collected
from megatron_train.saved_values import short_repr

_ABOUT = "about"
"""Key of a file that is not a section but a description of the file."""

_KIND = "kind"
"""Key of a file that is not a section but the kind of model that its settings are for."""


MOST_BYTES = 1 << 20
_LONGEST_REASON = 400
_DEEPEST = 20


class _Loader(yaml.SafeLoader):
    """Loads plain values from YAML; duplicate keys and deep nesting are errors."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.YAMLError(f"more than {_DEEPEST} levels of nesting")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: the key {short_repr(key.value)} is given twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def read_file(path: Path, options: Sequence[Option], kind: str | None = None) -> Values:
    """Reads the settings in the YAML file ``path``.

    Args:
        path: Path of the file.
        options: All settings of a run.
        kind: Kind of the model. Defaults to None, which accepts files for every kind.

    Raises:
        TrainError: The file is not YAML or has no sections, or a section or key is unknown or a
            value invalid; the message names the file, the key and the nearest known key. Or the
            file is for another kind of model.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TrainError(
            f"{path} is larger than {MOST_BYTES} bytes, the maximum for a configuration file; "
            "give a YAML file of settings"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is not YAML: {error}") from error
    return parse_settings(text, str(path), options, kind)


def parse_settings(
    text: str, name: str, options: Sequence[Option], kind: str | None = None
) -> Values:
    """Reads the settings in YAML ``text``; errors and origins name it ``name``."""
    document = _load(text, name)
    document.pop(_ABOUT, None)
    own = document.pop(_KIND, None)
    if own is not None and kind is not None and own != kind:
        other = short_repr(own).strip("'")
        raise TrainError(
            f"{name} is for models of kind {other}, not {kind}; give another, or use "
            f"megatron-train pretrain {other}"
        )
    given: dict[str, GivenValue] = {}
    errors: list[str] = []
    for section, content in document.items():
        with collect_errors(errors):
            found = _read_section(name, str(section), content, options)
            for key in found.keys() & given.keys():
                other = given[key].origin.rpartition(" ")[2]
                errors.append(
                    f"{found[key].origin} and {other} are the old and the new key of one setting; "
                    "leave out one of them"
                )
            given.update(found)
    raise_collected(errors)
    return Values(given)


def file_description(text: str) -> str:
    """Returns the description under ``about`` in one line; empty if there is none."""
    return " ".join(str(_load(text, "recipe").get(_ABOUT, "")).split())


def file_kind(text: str) -> str | None:
    """Returns the kind of model that a file of settings names; None if it names none."""
    found = _load(text, "recipe").get(_KIND)
    return None if found is None else str(found)


def _load(text: str, name: str) -> dict[Any, Any]:
    try:
        document = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid date or too many digits
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        reason = reason[:_LONGEST_REASON]
        raise TrainError(f"{name} is not YAML: {reason}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise TrainError(
            f"{name} must contain sections such as `model:`, got {type(document).__name__}"
        )
    return document


def _read_section(
    path: str, section: str, content: Any, options: Sequence[Option]
) -> dict[str, GivenValue]:
    known = {option.key: option for option in options}
    sections = list(dict.fromkeys(option.section for option in options))
    if section not in sections:
        name = section.replace("-", "_")
        flag = "--" + section.replace("_", "-")
        matches = [o.key for o in options if o.name == name or flag in (o.flag, o.opposite)]
        near = f"; did you mean {matches[0]}?" if matches else nearest(section, sections)
        raise TrainError(
            f"{path}: unknown section {short_repr(section)}{near} (known: {', '.join(sections)})"
        )
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise TrainError(
            f"{path}: section {short_repr(section)} must contain `key: value` lines, "
            f"got {short_repr(content)}"
        )
    given: dict[str, GivenValue] = {}
    errors: list[str] = []
    for name, value in content.items():
        given_key = f"{section}.{name}"
        key = RENAMED_KEYS.get(given_key, given_key)
        if key not in known:
            near = _nearest_key(given_key, str(name), list(known))
            errors.append(f"{path}: unknown key {short_repr(given_key)[1:-1]}{near}")
            continue
        with collect_errors(errors):
            origin = f"{path}: {given_key}"
            given[key] = GivenValue(known[key].coerce(value, origin), origin)
    raise_collected(errors)
    return given


def _nearest_key(key: str, name: str, known: Sequence[str]) -> str:
    same_name = [other for other in known if other.split(".")[1] == name.replace("-", "_")]
    return f"; did you mean {same_name[0]}?" if same_name else nearest(key, known)


def to_yaml(sections: dict[str, dict[str, Any]]) -> str:
    """Returns ``sections`` as YAML text that `read_file` accepts."""
    plain = {
        section: {key: list(v) if isinstance(v, tuple) else v for key, v in content.items()}
        for section, content in sections.items()
        if content
    }
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=False, allow_unicode=True)
