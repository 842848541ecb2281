"""Every setting as one plain record, read from the fields of a configuration dataclass.

A field's ``metadata`` may hold ``help``, ``flag`` (the flag's spelling; by default the field's
name), ``unit`` and ``choices``. Flags, YAML keys, the reference table and the checks are all made
from the records here, so a setting is described in exactly one place.
"""

import dataclasses
import math
import os
import types
import typing
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
    "data.sample_order": "stateless; with --sft packed, or compat where it is JSON lines",
}
_OFF_PREFIXES = ("--no-", "--disable-")
_OFF_NAMES = ("no_", "disable_")


@dataclass(frozen=True)
class Option:
    """One setting: where it lives, what it takes and how it is spelt.

    Attributes:
        section: name of the section of the run's configuration that holds it.
        name: field of the section's dataclass, and key in a YAML file.
        flag: command-line spelling. For a switch it is the spelling that changes the default.
        opposite: for a switch, the spelling that sets it the other way; otherwise None.
        kind: ``integer``, ``number``, ``text`` or ``switch``; of each element where ``repeated``.
        repeated: whether it takes several values.
        optional: whether it may be left unset (None).
        required: whether it has no default at all.
        derived_default: For a required option, what replaces a missing value; empty if nothing.
        default: the default; None where ``required``.
        choices: the values it may take, empty if any.
        help: one line of explanation.
        unit: unit of the value, empty if none.
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

    @property
    def key(self) -> str:
        """The setting's place in a YAML file, ``section.name``."""
        return f"{self.section}.{self.name}"

    @property
    def default_text(self) -> str:
        """The default as it would be given."""
        return " ".join(map(str, self.default)) if self.repeated else str(self.default)

    def flag_value(self) -> bool:
        """For a switch, the value that ``flag`` sets."""
        if self.name.startswith(_OFF_NAMES):  # the field itself is a denial, as no_load_optim
            return True
        return not self.flag.startswith(_OFF_PREFIXES)

    def command_line(self, value: Any) -> str:
        """Returns the command-line text that sets this option to ``value``."""
        if self.kind == "switch":
            return self.flag if value == self.flag_value() else str(self.opposite)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return f"{self.flag} {shown}"

    def coerce(self, value: Any, origin: str) -> Any:
        """Returns ``value`` as this option's type, or raises an error that names ``origin``.

        Text is accepted for numbers (a flag always gives text, and YAML reads ``1e-4`` as text);
        a switch takes only true and false, and a number is never taken for text.
        """
        if value is None:
            if self.optional:
                return None
            raise TrainError(f"{origin} needs {self._wanted()}, got nothing")
        if self.repeated:
            items = value if isinstance(value, list | tuple) else [value]
            if self.kind == "text":  # weights among paths
                items = [str(item) if type(item) in (int, float) else item for item in items]
            return tuple(self._coerce_one(item, origin) for item in items)
        return self._coerce_one(value, origin)

    def _coerce_one(self, value: Any, origin: str) -> Any:
        result = _read(self.kind, value)
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
    """Returns the flag of every field of a configuration dataclass that is a setting."""
    return {option.name: option.flag for option in options_of(cls, "")}


def options_of(cls: type, section: str) -> tuple[Option, ...]:
    """Reads the options of the configuration dataclass ``cls``, in the order of its fields.

    A field with ``metadata={"flag": None}`` is not an option: only code sets it.
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
    )


def _flag_of(name: str, *, off: bool) -> str:
    """The flag of a field that names none: of a switch that is on, the one that turns it off."""
    return ("--no-" if off else "--") + name.replace("_", "-")


def _opposite(flag: str, name: str) -> str:
    if flag.startswith("--no-"):
        return "--" + flag.removeprefix("--no-")
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
    """Splits a type hint into (kind, repeated, optional, choices of a Literal)."""
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
    """Returns ``value`` as ``kind``, or None if it is not one."""
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
    """Returns whether the system takes a text for a name; arguments that are no UTF-8 count."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
