"""Selection of the layers of a model that a row applies to."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ckpt.errors import CheckpointError, did_you_mean

LAYER = "{i}"
_FEW_LAYERS = 1000  # always expanded, so that the error can name the missing tensor
_KEYS = ("count", "from", "to", "every", "only", "if", "unless")


def select_layers(
    ours: str, where: Mapping[str, Any], config: object, max_tensors: int | None
) -> Sequence[int]:
    """Returns the numbers of the layers that a row applies to; one number if its names have none.

    Args:
        ours: The first name of the row.
        where: ``count`` is the number of layers (defaults to ``"$num_layers"``). ``from`` and
            ``to`` (exclusive), ``every`` and ``only`` select layers. ``if`` and ``unless`` name a
            property of the configuration that must be true or false: one boolean for the model, or
            one for each layer.
        config: The configuration of the model.
        max_tensors: The number of tensors in the source.

    Raises:
        CheckpointError: A word or value is unknown, or there are more layers than tensors in the
            source.
    """
    for key in where:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            raise CheckpointError(f"row {ours!r}: unknown key {key!r} for its layers{hint}")
    if LAYER not in ours:
        if more := sorted(where.keys() - {"if", "unless"}):
            raise CheckpointError(f"row {ours!r}: {more[0]!r} needs {LAYER} in its names")
        return [0] if _holds(ours, where, config, None, 0) else []
    count = resolve_int(where.get("count", "$num_layers"), config, ours, 0)
    if max_tensors is not None and count > max(max_tensors, _FEW_LAYERS):
        raise CheckpointError(
            f"the configuration has {count} layers, but the source has only {max_tensors} tensors"
        )
    return [i for i in _chosen(ours, where, config, count) if _holds(ours, where, config, count, i)]


def _chosen(ours: str, where: Mapping[str, Any], config: object, count: int) -> Sequence[int]:
    if "only" not in where:
        first = resolve_int(where.get("from", 0), config, ours, 0)
        last = resolve_int(where.get("to", count), config, ours, 0)
        return range(first, min(last, count), resolve_int(where.get("every", 1), config, ours, 1))
    if where.keys() & {"from", "to", "every"}:
        raise CheckpointError(f"row {ours!r}: 'only' excludes 'from', 'to' and 'every'")
    given = where["only"]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise CheckpointError(f"row {ours!r}: 'only' needs a list: {given!r}")
    numbers = [resolve_int(each, config, ours, 0) for each in given]
    if outside := [i for i in numbers if i >= count]:
        raise CheckpointError(f"row {ours!r}: there is no layer {outside[0]} of {count}")
    return numbers


def _holds(
    ours: str, where: Mapping[str, Any], config: object, count: int | None, layer: int
) -> bool:
    for key, wanted in (("if", True), ("unless", False)):
        if key not in where:
            continue
        found = resolve_field(where[key], config, ours) if isinstance(where[key], str) else None
        if isinstance(found, Sequence) and len(found) == count:
            found = found[layer]
        if not isinstance(found, bool):
            raise CheckpointError(
                f"row {ours!r}: {key} {where[key]!r} is not a boolean"
                f"{'' if count is None else f', nor a list of {count} booleans'}"
            )
        if found != wanted:
            return False
    return True


def resolve_int(value: object, config: object, ours: str, lowest: int) -> int:
    """Returns a number, or the field that ``"$field"`` names; ``ours`` is for messages."""
    number = resolve_field(value, config, ours) if isinstance(value, str) else value
    if (
        isinstance(number, bool)
        or not isinstance(number, int)
        or number < lowest
        or (lowest == -1 and number == 0)
    ):
        raise CheckpointError(f"row {ours!r}: {value!r} is not an integer of at least {lowest}")
    return number


def resolve_field(value: str, config: object, ours: str) -> Any:
    """Returns the field of a configuration that ``"$field"`` names; ``ours`` is for messages."""
    name = value.removeprefix("$")
    known = list(config) if isinstance(config, Mapping) else dir(config)
    if name == value or name not in known:
        hint = did_you_mean(name, (word for word in known if not word.startswith("_")))
        raise CheckpointError(f"row {ours!r}: the model configuration has no field {value!r}{hint}")
    return config[name] if isinstance(config, Mapping) else getattr(config, name)
