"""Serialisation of plain values as JSON that restores exactly the same values.

JSON has null, booleans, numbers, strings, lists and objects with string keys. Other values are
written as an object with one key that starts with ``$``: bytes, tuples, floats that are not finite,
and dictionaries whose keys are not plain strings or start with ``$``.
"""

import base64
import json
import math
from typing import TypeAlias

from megatron_ckpt.errors import CheckpointError, shorten

Plain: TypeAlias = (
    "bool | int | float | str | bytes | list[Plain] | tuple[Plain, ...] | dict[Plain, Plain] | None"
)


def encode(value: object, where: str) -> object:
    """Returns ``value`` in JSON types; ``where`` is its name in error messages.

    Raises:
        CheckpointError: The value has another type.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [
            [encode(key, f"{where} key"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"$dict": pairs}
    raise CheckpointError(
        f"state {where!r} has type {type(value).__name__}; use a list of views for tensors, or "
        "None, bool, int, float, str, bytes, list, tuple or dict"
    )


def decode(value: object) -> Plain:
    """Reverses `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value  # type: ignore[return-value]  # json returns no other types
    match list(value.items()):
        case [("$float", str(text))]:
            return float(text)
        case [("$bytes", str(text))]:
            return base64.b64decode(text)
        case [("$tuple", list(items))]:
            return tuple(decode(item) for item in items)
        case [("$dict", list(pairs))]:
            return {decode(key): decode(item) for key, item in pairs}
        case items:
            return {key: decode(item) for key, item in items}


def dumps(value: object, where: str) -> str:
    """Returns ``value`` as text, which depends on the value alone."""
    return json.dumps(encode(value, where), ensure_ascii=False)


def loads(text: str | bytes) -> Plain:
    """Reverses `dumps`.

    Raises:
        CheckpointError: The text is not JSON, is nested too deeply to be read, or has marks that
            `encode` does not write.
    """
    try:
        return decode(json.loads(text))
    except RecursionError:
        raise CheckpointError("stored values are nested too deeply to be read") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"stored values cannot be read: {shorten(error)}") from error
