"""What a family of published models is, as plain data that a checkpoint converter can interpret."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_models.config import GPTConfig
from megatron_models.errors import ConfigError
from megatron_models.families.neutral import NEUTRAL, WINDOWS

Operation = tuple[str, Mapping[str, Any]]
"""A reversible operation and its arguments; ``"$field"`` stands for a configuration field."""

Ignored = tuple[str, str, Mapping[str, Any]]
"""Pattern of foreign names, a check that megatron-ckpt knows, and its arguments."""

EXPERT = "{e}"

Row = tuple[str, tuple[str, ...], tuple[Operation, ...]]
"""One of our parameters, the foreign tensors it is made of, and the operations theirs -> ours."""


@dataclass(frozen=True)
class Family:
    """How the weights and configuration of one family map to ours, in both directions.

    Operations are reversible: a row is read from left to right to import and from right to left to
    export. ``{i}`` in a name is the global layer number, ``{e}`` in a foreign one each expert's.

    Attributes:
        name: the family's name, as stored in checkpoints.
        version: of the rows; raised when a row changes meaning.
        architectures: names of the Hugging Face classes that hold such weights.
        rows: one row for every parameter a model of the family can have.
        conditions: for parameters that only some models have, the boolean configuration field or
            property that says whether this one does. All others are always there.
        ignored: foreign tensors that are passed over where no active row claims them, once they are
            found to say nothing: buffers that follow from the configuration, and the copy of a tied
            weight.
        prefix: the start of foreign names that files written from the headless class leave out.
        config_to_hf: makes the content of ``config.json``; raises ConfigError if the family cannot
            express the model.
        config_from_hf: reads the content of ``config.json``; raises ConfigError for settings this
            package does not implement.
        config_from_json: reads the configuration a checkpoint holds, as ``to_json`` wrote it.
    """

    name: str
    version: int
    architectures: tuple[str, ...]
    rows: tuple[Row, ...]
    config_to_hf: Callable[[GPTConfig], dict[str, Any]]
    config_from_hf: Callable[[Mapping[str, Any]], GPTConfig]
    conditions: Mapping[str, str]
    ignored: tuple[Ignored, ...] = ()
    prefix: str = ""
    config_from_json: Callable[[Mapping[str, Any]], GPTConfig] = GPTConfig.from_dict

    def active_rows(self, config: GPTConfig) -> tuple[Row, ...]:
        """Return the rows of the parameters that a model of ``config`` has, expert by expert."""
        return tuple(
            (ours, _of_experts(theirs, config.num_experts), operations)
            for ours, theirs, operations in self.rows
            if ours not in self.conditions or getattr(config, self.conditions[ours])
        )


def _of_experts(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Write out names with ``{e}`` for every expert: all of the first, all of the second, ..."""
    if not any(EXPERT in name for name in names):
        return names
    return tuple(name.replace(EXPERT, str(e)) for e in range(count) for name in names)


def need(values: Mapping[str, Any], key: str, family: str) -> Any:
    """Return ``values[key]``, or say that the foreign configuration lacks it."""
    if values.get(key) is None:
        raise ConfigError(f"the {family} configuration lacks {key!r}")
    return values[key]


def refuse_unless(
    values: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], family: str
) -> None:
    """Refuse a foreign configuration whose settings are outside what this package implements.

    Args:
        values: content of ``config.json``.
        allowed: for each key the values that may stand there; an absent key is always fine. They
            come before those of `NEUTRAL`, which holds for every family.
        family: name used in the message.
    """
    for key, choices in {**NEUTRAL, **allowed}.items():
        if key in values and values[key] not in choices:
            raise ConfigError(
                f"{family} models with {key} = {reprlib.repr(values[key])} are not supported, only "
                + " or ".join(map(repr, choices))
            )
    _refuse_windows(values, family)


def _refuse_windows(values: Mapping[str, Any], family: str) -> None:
    """Refuse windows that hide any of the positions, in all layers or in some.

    A window as long as the positions hides nothing, as no longer sequence is taken.
    """
    key = "n_positions" if "n_positions" in values else "max_position_embeddings"
    positions, whole = values.get(key), ["full_attention"]
    for name, kind in WINDOWS.items():
        window = values.get(name)
        if window is None:
            continue
        if type(window) is not int or type(positions) is not int or window < positions:
            raise ConfigError(
                f"{family} models with {name} = {reprlib.repr(window)} are not supported, only "
                f"None or at least {key} = {reprlib.repr(positions)}"
            )
        whole.append(kind)
    if values.get("use_sliding_window") and "sliding_attention" not in whole:
        raise ConfigError(
            f"{family} models with use_sliding_window = "
            f"{reprlib.repr(values['use_sliding_window'])} and no sliding_window are not supported"
        )
    kinds = values.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind not in whole for kind in kinds)
    ):
        raise ConfigError(
            f"{family} models with layer_types = {reprlib.repr(kinds)} are not supported, only "
            f"{' or '.join(map(repr, whole))} in every layer"
        )


def require(config: GPTConfig, wanted: Mapping[str, Any], family: str) -> None:
    """Refuse to export a model that the family cannot express, naming the field and both values."""
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"a {family} model has {name} = {value!r}, this one has {getattr(config, name)!r}; "
                "it cannot be exported to that family"
            )
