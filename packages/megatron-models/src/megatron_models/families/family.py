"""What a family of published models is, as plain data that a checkpoint converter can interpret."""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.neutral import (
    NEUTRAL,
    WINDOW_FIELDS,
    WITHOUT_EFFECT,
    refuse_windows,
)
from megatron_models.families.settings import (
    Fixed,
    InexpressibleError,
    Odd,
    Setting,
    Values,
    default_of,
    unsupported,
)
from megatron_models.kinds import find_kind
from megatron_models.models.model_config import ModelConfig

Operation = tuple[str, Mapping[str, Any]]
"""A reversible operation and its arguments; ``"$field"`` stands for a configuration field."""

Ignored = tuple[str, str, Mapping[str, Any]]
"""Pattern of foreign names, a check that megatron-ckpt knows, and its arguments."""

Where = Mapping[str, Any]
"""For which models and layers a row is, as megatron-ckpt's schema says."""

Names = str | tuple[str, ...]
Row = (
    tuple[Names, tuple[str, ...], tuple[Operation, ...]]
    | tuple[Names, tuple[str, ...], tuple[Operation, ...], Where]
)
"""Our parameter or parameters, the foreign tensors they are made of, the operations theirs -> ours,
and where, for those that only some models or layers have."""

EXPERT = "{e}"
UNTIED: Where = {"if": "$untie_embeddings_and_output_weights"}
"""Of the row of an output matrix."""

_SHOWN = 3  # differences named in a message


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the weights and configuration of one family map to ours, in both directions.

    Operations are reversible: a row is read from left to right to import and from right to left to
    export. ``{i}`` in a name is the global layer number, ``{e}`` in a foreign one each expert's.

    The world of settings is closed on both sides. A field of ours that no setting names must have
    its default to be exported, so that a field which is added to a configuration later is refused
    by a family that does not know it. A field of theirs that nothing names must be null to be
    imported: that is how a ``config.json`` says that an option is not used, whereas False may turn
    off what every model of the family has.

    Attributes:
        name: the family's name, as stored in checkpoints.
        title: its name in messages.
        version: of the rows; raised when a row changes meaning.
        kind: of models that it describes.
        architectures: names of the Hugging Face classes that hold such weights.
        model_type: value of ``model_type`` in their ``config.json``.
        rows: together they name every parameter that a model of the family can have.
        settings: how each field of ours stands in their ``config.json``.
        odd: fields that take functions.
        neutral: more fields of theirs, with the values that have no effect; they come before
            those of `NEUTRAL`, which holds for every family.
        without_effect: fields of theirs that never have an effect, besides `WITHOUT_EFFECT`.
        written: fields of theirs that are written with fixed values.
        ignored: foreign tensors that are passed over where no row claims them, once they are
            found to say nothing: buffers that follow from the configuration, and the copy of a tied
            weight.
        prefix: the start of foreign names that files written from the headless class leave out.
    """

    name: str
    title: str
    version: int
    kind: str
    architectures: tuple[str, ...]
    model_type: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Setting]
    odd: tuple[Odd, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    written: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    prefix: str = ""

    @property
    def config_version(self) -> int:
        """The version of configurations that a checkpoint's record holds now."""
        return find_kind(self.kind).version

    def config_from_record(self, fields: Mapping[str, Any], version: int) -> ModelConfig:
        """Read the configuration of a checkpoint's record, as ``to_json`` of a version wrote it."""
        return find_kind(self.kind).read(fields, version)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Makes the content of ``config.json``.

        Raises:
            ConfigError: the family cannot express the model; names the fields and their values.
        """
        content, found = self._written(config)
        if found:
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(
                f"a {self.title} model has {'; '.join(found[:_SHOWN])}{more}; it cannot be "
                "exported to that family"
            )
        return content

    def differences(self, config: ModelConfig) -> list[str]:
        """Returns what of a model the family cannot express: ``"field = value, this one has ..."``.

        Empty where it can.
        """
        return self._written(config)[1]

    def _written(self, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
        """Returns the content of ``config.json``, and what it cannot say."""
        content: dict[str, Any] = {
            "architectures": list(self.architectures[:1]),
            "model_type": self.model_type,
        }
        found: list[str] = []
        writers: list[Callable[[], Mapping[str, Any]]]
        writers = [partial(rule.write, config) for rule in self.odd]
        odd = {name for rule in self.odd for name in rule.ours}
        for entry in dataclasses.fields(config):
            if entry.metadata.get("no_effect"):
                continue
            if entry.name in self.settings:
                writers.append(partial(self.settings[entry.name].write, entry.name, config))
            elif entry.name not in odd:
                writers.append(partial(Fixed(default_of(entry)).write, entry.name, config))
        for write in writers:
            try:
                content |= write()
            except InexpressibleError as error:
                found.append(str(error))
        return {**content, **self.written}, found

    def config_from_hf(self, values: Values) -> ModelConfig:
        """Reads the content of ``config.json``. Dropout rates are not part of a model here.

        Raises:
            ConfigError: a setting this package does not implement, or does not know; names the
                field and its value.
        """
        self._refuse_unknown(values)
        refuse_windows(self.title, values)
        ours: dict[str, Any] = {}
        for name, setting in self.settings.items():
            ours |= setting.read(self.title, name, values)
        for rule in self.odd:
            ours |= rule.read(self.title, values)
        return find_kind(self.kind).config.from_dict(ours)

    def _refuse_unknown(self, values: Values) -> None:
        rules = (*self.settings.values(), *self.odd)
        mapped = {name for rule in rules for name in rule.names} | WINDOW_FIELDS
        unused = WITHOUT_EFFECT | self.without_effect
        neutral = {**NEUTRAL, "model_type": (self.model_type,), **self.neutral}
        for name, value in values.items():
            if name in mapped or name in unused or value is None:
                continue
            if name not in neutral:
                raise ConfigError(
                    f"{self.title} models with {reprlib.repr(name)} = {reprlib.repr(value)} are "
                    "not supported: the family does not know this field; remove it if it has no "
                    "effect on the model"
                )
            if not any(type(value) is type(one) and value == one for one in neutral[name]):
                raise unsupported(self.title, name, value, list(neutral[name]))

    def active_rows(self, config: ModelConfig) -> tuple[Row, ...]:
        """Returns the rows for a model of ``config``, expert by expert."""
        rows: list[Row] = []
        for ours, theirs, *more in self.rows:
            names = _of_experts(theirs, getattr(config, "num_experts", 0))
            if names:  # a row of experts is of no tensors in a model without any
                rows.append((ours, names, *more))
        return tuple(rows)


def _of_experts(names: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Writes out names with ``{e}`` for every expert: all of the first, all of the second, ..."""
    if not any(EXPERT in name for name in names):
        return names
    return tuple(name.replace(EXPERT, str(e)) for e in range(count) for name in names)
