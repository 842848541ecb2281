"""Small copies of a model that have its structure: fewer layers, smaller sizes.

A field whose metadata have ``small`` can be smaller (`megatron_models.components.fields.flag`). The
copy has the same parameters, cut in the same way, and the same order of sizes that are compared:
fewer groups than heads, fewer selected experts than experts. Importing this module does not import
torch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, Final, TypeVar

from megatron_models.models.model_config import ModelConfig

Config = TypeVar("Config")
Model = TypeVar("Model", bound=ModelConfig)

_NEAR: Final = 64
"""Distance from the small size up to which every size is tried."""


def layers_alike(config: ModelConfig) -> tuple[int, ...]:
    """Returns for each layer of all trunks the first layer that is equal to it.

    Layers of different trunks are never equal.
    """
    found: list[int] = []
    for trunk in config.trunks().values():
        first: list[tuple[Any, int]] = []
        for layer in trunk.layers.values():
            number = next((other for known, other in first if known == layer), len(found))
            if number == len(found):
                first.append((layer, number))
            found.append(number)
    return tuple(found)


def with_layers(config: Model, layers: Sequence[int]) -> Model:
    """Returns the configuration with only some of the layers.

    Args:
        config: The configuration.
        layers: Global numbers of the layers over all trunks, ascending. Every trunk has one.

    Raises:
        ConfigError: The model needs the other layers.
    """
    return dataclasses.replace(config, **config.fields_for_layers(layers))


def shrunk(
    config: Model, accepts: Callable[[Model], bool], sequence_length: int | None = None
) -> Model:
    """Returns a small copy of a model with the same layers and the same structure.

    Args:
        config: The configuration.
        accepts: Returns whether a copy is possible, for example with a layout. It is not called
            with copies that the configuration itself refuses.
        sequence_length: Tokens of a sample. Windows and other lengths that are not below it never
            matter and are kept. Defaults to None, with which no length is kept.
    """
    structure, before = _structure(config), config

    def has_structure(copy: Model) -> bool:
        nonlocal before
        if _structure(copy) != structure or _description(copy) == _description(before):
            return False  # an unused field
        if accepts(copy):
            before = copy
            return True
        return False

    kept = {
        entry.name
        for entry in dataclasses.fields(config)
        if entry.metadata.get("unit") == "tokens"
        and entry.name not in ("max_position_embeddings", "vocab_size")
        and sequence_length is not None
        and getattr(config, entry.name) >= sequence_length
    }
    return smaller_sizes(config, has_structure, kept)


def smaller_sizes(
    config: Config, accepts: Callable[[Config], bool], kept: frozenset[str] | set[str] = frozenset()
) -> Config:
    """Returns a copy of a frozen dataclass whose fields with ``small`` in their metadata shrink.

    Sizes of one unit that one class defines keep their order, and stay equal if they are.

    Args:
        config: The dataclass. It raises a `ValueError` if values do not fit together.
        accepts: Returns whether a copy is possible.
        kept: Names of fields that do not shrink.
    """
    groups = _groups(config, kept)
    shrinks = True
    while shrinks:  # a size may shrink after another that depends on it
        shrinks = False
        for names, ordered in groups:
            smaller = _first_smaller(config, names, ordered, accepts)
            if smaller is not None:
                config, shrinks = smaller, True
    return config


def _first_smaller(
    config: Config,
    names: Sequence[str],
    ordered: Sequence[str],
    accepts: Callable[[Config], bool],
) -> Config | None:
    """Returns a copy with the smallest possible value of equal sizes, or None."""
    derived = _derived(config)
    for changes in _candidates(config, names):
        for others in ({name: 0 for name in derived if name not in changes}, {}):
            try:
                copy = dataclasses.replace(config, **others, **changes)  # type: ignore[type-var]
            except ValueError:
                continue
            if _same_order(config, copy, ordered) and accepts(copy):
                return copy
            if not others:
                break
    return None


def _derived(config: Any) -> list[str]:
    """Returns the names of fields with the values that other fields determine."""
    found = []
    for entry in dataclasses.fields(config):
        if entry.metadata.get("derived") and getattr(config, entry.name):
            try:
                alone = dataclasses.replace(config, **{entry.name: 0})
            except ValueError:
                continue
            if getattr(alone, entry.name) == getattr(config, entry.name):
                found.append(entry.name)
    return found


def _groups(config: Any, kept: frozenset[str] | set[str]) -> list[tuple[list[str], list[str]]]:
    """Returns groups of equal sizes that shrink together, and the sizes they are compared with."""
    related: dict[tuple[str, str], list[str]] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if entry.metadata.get("small") is not None and value and entry.name not in kept:
            key = _owner(type(config), entry.name), entry.metadata.get("unit", "")
            related.setdefault(key, []).append(entry.name)
    found = []
    for names in related.values():
        by_value: dict[int, list[str]] = {}
        for name in names:
            by_value.setdefault(getattr(config, name), []).append(name)
        found += [(equal, names) for equal in by_value.values()]
    return found


def _owner(kind: type, name: str) -> str:
    """Returns the name of the class that first defines a field."""
    return next(
        base.__qualname__
        for base in reversed(kind.__mro__)
        if name in vars(base).get("__annotations__", {})
    )


def _candidates(config: Any, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields smaller values of equal sizes, ascending."""
    entries = {entry.name: entry for entry in dataclasses.fields(config)}
    small = max(entries[name].metadata["small"] for name in names)
    value: int = getattr(config, names[0])
    near = min(small + _NEAR, value)
    if all(value == entries[name].default for name in names):
        near = min(small + 1, value)  # often unused, so that no size is accepted
    halves = [value >> power for power in range(value.bit_length(), 0, -1)]
    for size in (*range(small, near), *(half for half in halves if half >= max(near, small))):
        yield dict.fromkeys(names, size)


def _same_order(config: Any, copy: Any, names: Sequence[str]) -> bool:
    """Returns whether sizes of a copy compare with one another as those of the configuration."""
    return all(
        _sign(getattr(config, a) - getattr(config, b)) == _sign(getattr(copy, a) - getattr(copy, b))
        for a, b in combinations(names, 2)
    )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _structure(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Returns all parameters and state by name, and how they are cut, without their sizes."""
    table = {name: spec.sharding for name, spec in config.parameters().items()} | config.state()
    return {
        name: (
            *(cut.axis, cut.dim, cut.spill_dim, cut.fused_dim, cut.experts, cut.tied),
            *(len(cut.shape), cut.padded is None, cut.matrix is None, cut.vocabulary),
            *(cut.partial, cut.init.kind),
        )
        for name, cut in table.items()
    }


def _description(config: ModelConfig) -> tuple[Any, ...]:
    """Returns everything that modules are built from."""
    return (
        config.shared_embedding(),
        config.trunks(),
        config.multi_token(),
        {name: spec.sharding.shape for name, spec in config.parameters().items()},
    )
