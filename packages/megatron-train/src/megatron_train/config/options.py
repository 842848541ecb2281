"""Settings as plain records, read from the fields of configuration dataclasses.

A field's ``metadata`` may have ``help``, ``flag`` (defaults to the field's name), ``unit``,
``choices`` and bounds. Flags, YAML keys, the reference page and checks are generated from these
records, so that each setting is described in exactly one place.
"""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from megatron_train._command import nearest
from megatron_train.errors import TrainError
from megatron_train.saved_values import MAX_INTEGER, short_repr

_SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "switch"}
_DERIVED = {
    "model.vocab_size": "the tokenizer's",
    "model.max_position_embeddings": "--seq-length",
    "data.sample_order": "stateless; with --sft packed, or compat for JSON lines",
}
_OFF_WORDS = {"no", "disable"}
"""Words of a flag that turns its setting off, as in ``--bert-no-binary-head``."""


@dataclass(frozen=True)
class Option:
    """One setting: its key, type, default and flag.

    Attributes:
        section: Name of the section.
        name: Field of the section's dataclass and key in the section of a YAML file.
        flag: Command-line flag. For a switch, the flag that changes the default.
        opposite: For a switch, the flag that sets the other value; otherwise None.
        kind: ``integer``, ``number``, ``text`` or ``switch``: the type of the value, or of each
            element if ``repeated``.
        repeated: Whether the setting takes several values.
        optional: Whether the setting may be unset (None).
        required: Whether the setting has no default.
        derived_default: For a required option, what replaces a missing value; empty if nothing.
        default: Default value; None if ``required``.
        choices: Allowed values; empty if all values are allowed.
        help: One line of help.
        unit: Unit of the value; empty if there is none.
        bounds: The smallest and largest number, as text; empty if the field states none.
    """

    section: str
    name: str
    flag: str
    opposite: str | None
    kind: str
    repeated: bool
    optional: bool
    required: bool
    default: Any
    choices: tuple[Any, ...]
    help: str
    unit: str
    derived_default: str = ""
    bounds: str = ""

    @property
    def key(self) -> str:
        """The key of the setting: ``section.name``."""
        return f"{self.section}.{self.name}"

    @property
    def default_text(self) -> str:
        """The default as command-line text."""
        return " ".join(map(str, self.default)) if self.repeated else str(self.default)

    def flag_value(self) -> bool:
        """Returns the value that ``flag`` sets, for a switch."""
        return not _turns_off(self.flag, self.name)

    def command_line(self, value: Any) -> str:
        """Returns the command-line arguments that set this option to ``value``."""
        if self.kind == "switch":
            return self.flag if value == self.flag_value() else str(self.opposite)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return f"{self.flag} {shown}"

    def coerce(self, value: Any, origin: str) -> Any:
        """Returns ``value`` converted to this option's type.

        Text is accepted for numbers: flags give text, and YAML reads ``1e-4`` as text. A switch
        takes only true and false. A number is not accepted for text.

        Raises:
            TrainError: The value does not have the type; the message names ``origin``.
        """
        if value is None:
            if self.optional:
                return None
            raise TrainError(f"{origin} needs {self._wanted()}, got nothing")
        if self.repeated:
            items = value if isinstance(value, list | tuple) else [value]
            if self.kind == "text":  # weights between paths
                items = [str(item) if type(item) in (int, float) else item for item in items]
            return tuple(self._coerce_one(item, origin) for item in items)
        return self._coerce_one(value, origin)

    def _coerce_one(self, value: Any, origin: str) -> Any:
        result = _read(self.kind, value)
        if value == "" and self.default == "":  # stands for no value
            return value
        if result is None:
            raise TrainError(f"{origin} needs {self._wanted()}, got {short_repr(value)}")
        if isinstance(result, float) and not math.isfinite(result):
            raise TrainError(f"{origin} needs a finite number, got {short_repr(value)}")
        if self.choices and result not in self.choices:
            near = nearest(str(result), map(str, self.choices))
            raise TrainError(f"{origin} needs {self._wanted()}, got {short_repr(value)}{near}")
        return result

    def _wanted(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        article = "an" if self.kind == "integer" else "a"
        return "text" if self.kind == "text" else f"{article} {self.kind}"


def flags_of(cls: type[Any]) -> dict[str, str]:
    """Returns the flags of the settings of a configuration dataclass by field name."""
    return {option.name: option.flag for option in options_of(cls, "")}


def options_of(cls: type, section: str) -> tuple[Option, ...]:
    """Returns the options of the configuration dataclass ``cls`` in the order of its fields.

    A field with ``metadata={"flag": None}`` is not an option; only code sets it.
    """
    hints = typing.get_type_hints(cls)
    fields = (
        f for f in dataclasses.fields(cls) if f.init and f.metadata.get("flag", "") is not None
    )
    return tuple(_option(field, hints[field.name], section) for field in fields)


def _option(field: "dataclasses.Field[Any]", hint: Any, section: str) -> Option:
    kind, repeated, optional, literal = _type_of(hint, f"{section}.{field.name}")
    default, required = _default_of(field)
    flag = field.metadata.get("flag") or _flag_of(field.name, off=default is True)
    return Option(
        section=section,
        name=field.name,
        flag=flag,
        opposite=_opposite(flag, field.name) if kind == "switch" else None,
        kind=kind,
        repeated=repeated,
        optional=optional or (default is None and not required),
        required=required,
        default=default,
        choices=tuple(field.metadata.get("choices") or literal),
        help=field.metadata.get("help", ""),
        unit=field.metadata.get("unit", ""),
        derived_default=_DERIVED.get(f"{section}.{field.name}", ""),
        bounds=_bounds(kind, field.metadata),
    )


def _bounds(kind: str, metadata: Mapping[str, Any]) -> str:
    """Returns the range that the metadata of a field state (`megatron_models`' ``flag``)."""
    bounds = []
    if metadata.get("nonnegative") or metadata.get("derived"):
        bounds.append("at least 0")
    elif metadata.get("positive"):
        bounds.append("at least 1" if kind == "integer" else "above 0")
    if "maximum" in metadata:
        bounds.append(f"at most {metadata['maximum']:,}")
    return ", ".join(bounds)


def _flag_of(name: str, *, off: bool) -> str:
    """Returns the flag derived from a field's name; with ``off``, the ``--no-`` flag."""
    return ("--no-" if off else "--") + name.replace("_", "-")


def _turns_off(flag: str, name: str) -> bool:
    """Returns whether a switch sets False: it has a negative word that the field does not have.

    ``--no-load-optim`` sets ``no_load_optim`` to True, and ``--no-mmap`` sets ``mmap`` to False.
    """
    return bool(_OFF_WORDS & ({*flag.removeprefix("--").split("-")} - {*name.split("_")}))


def _opposite(flag: str, name: str) -> str:
    if "-no-" in flag:
        return flag.replace("-no-", "-", 1)
    if flag.startswith("--disable-"):
        return "--" + name.replace("_", "-")
    return "--no-" + flag.removeprefix("--")


def _default_of(field: "dataclasses.Field[Any]") -> tuple[Any, bool]:
    if field.default is not dataclasses.MISSING:
        return field.default, False
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory(), False
    return None, True


def _type_of(hint: Any, where: str) -> tuple[str, bool, bool, tuple[Any, ...]]:
    """Splits a type hint into kind, repeated, optional and the choices of a Literal."""
    optional = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        if members == [int, float]:
            members = [float]
        if len(members) != 1:
            raise TypeError(f"{where}: a setting cannot have the type {hint}")
        hint = members[0]
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    literal: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Literal:
        literal = typing.get_args(hint)
        hint = type(literal[0])
    if hint is Path:
        hint = str
    if hint not in _SCALARS:
        raise TypeError(f"{where}: a setting cannot have the type {hint}")
    return _SCALARS[hint], repeated, optional, literal


def _read(kind: str, value: Any) -> Any:
    """Returns ``value`` converted to ``kind``; None if that is impossible."""
    if kind == "switch":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if kind == "text":
        return value if isinstance(value, str) and value and _can_be_a_path(value) else None
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
        if kind == "number":
            return number
        whole = int(value) if isinstance(value, str) or number == int(number) else None
        return whole if whole is not None and abs(whole) <= MAX_INTEGER else None
    except (ValueError, OverflowError):
        return None


def _can_be_a_path(text: str) -> bool:
    """Returns whether the system accepts a text as a path; it need not be valid UTF-8."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
