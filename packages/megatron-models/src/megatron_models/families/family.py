"""A family of published models, as plain data that a checkpoint converter interprets."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    Constant,
    Custom,
    HFConfig,
    Setting,
    UnsupportedFieldError,
    default_of,
    unsupported_hf_field,
)
from megatron_models.kinds import find_kind
from megatron_models.models.model_config import ModelConfig

Operation = tuple[str, Mapping[str, Any]]
"""A reversible operation and its arguments; ``"$field"`` stands for a configuration field."""

Ignored = tuple[str, str, Mapping[str, Any]]
"""Pattern of foreign names, the name of a check of megatron-ckpt, and its arguments."""

Where = Mapping[str, Any]
"""For which models and layers a row applies, as defined by megatron-ckpt's schema."""

Names = str | tuple[str, ...]
Row = (
    tuple[Names, tuple[str, ...], tuple[Operation, ...]]
    | tuple[Names, tuple[str, ...], tuple[Operation, ...], Where]
)
"""Our parameter or parameters, the foreign tensors that they are made of, the operations from
theirs to ours, and the condition of rows that only some models or layers have."""

EXPERT = "{e}"
DEPTH = "{m}"
UNTIED: Where = {"if": "$untie_embeddings_and_output_weights"}
"""The condition of the row of an output matrix."""

_SHOWN = 3  # differences listed in a message


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the weights and configurations of a family map to ours, in both directions.

    Operations are reversible: a row is read from left to right for import and from right to left
    for export. ``{i}`` in a name is the global layer number, ``{e}`` in a foreign name the number
    of an expert. ``{m}`` is a depth of multi-token prediction: its number in our names, and in
    foreign names that of its layer, which follows the layers of the model.

    Settings are closed on both sides. On export, a field of ours without a setting must have its
    default, so a family refuses fields that were added to a configuration later. On import, a field
    of theirs that is not listed must be null: null in a ``config.json`` means that an option is not
    used, whereas False may switch off what every model of the family has.

    Attributes:
        name: The family's name, as stored in checkpoints.
        title: Its name in messages.
        kind: Kind of the models.
        architectures: Names of the Hugging Face classes with such weights.
        model_type: Value of ``model_type`` in their ``config.json``.
        rows: Rows that together cover every parameter of a model of the family.
        settings: How each field of ours is expressed in their ``config.json``.
        custom: Fields that are converted by functions.
        neutral: Further fields of theirs, with the values that have no effect. They take precedence
            over `NEUTRAL` and `WITHOUT_EFFECT`, which hold for every family.
        without_effect: Fields of theirs that never have an effect, besides `WITHOUT_EFFECT`.
        exported_constants: Fields of theirs that are exported with fixed values.
        ignored: Foreign tensors that may be skipped if no row uses them and they pass a check:
            buffers that follow from the configuration, and the copy of a tied weight.
        prefix: Start of foreign names that files written from the headless class leave out.
        former_endings: Endings of foreign names in older files, and the present ones.
        defers_to: Names of families that are preferred for a model trained here that they can
            express, too.
        if_absent: Patterns of foreign tensors that a file may leave out although its
            ``config.json`` counts them, and for each the fields of theirs that then hold.
        published_code: Entries of ``auto_map`` in published files. Their code, which Transformers
            does not load since it has classes of its own, computes the same.
    """

    name: str
    title: str
    kind: str
    architectures: tuple[str, ...]
    model_type: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Setting]
    custom: tuple[Custom, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    exported_constants: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    prefix: str = ""
    former_endings: Mapping[str, str] = field(default_factory=dict)
    defers_to: tuple[str, ...] = ()
    if_absent: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published_code: Mapping[str, str] = field(default_factory=dict)

    @property
    def config_version(self) -> int:
        """The current version of configurations in a checkpoint's record."""
        return find_kind(self.kind).version

    def config_from_record(self, fields: Mapping[str, Any], version: int) -> ModelConfig:
        """Returns the configuration from the fields of a checkpoint's record, of any version."""
        return find_kind(self.kind).read(fields, version)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Returns the content of ``config.json``.

        Raises:
            ConfigError: The family cannot express the model; the message names the fields and
                their values.
        """
        content, found = self._to_hf(config)
        if found:
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(
                f"a {self.title} model has {'; '.join(found[:_SHOWN])}{more}; it cannot be "
                "exported to that family"
            )
        return content

    def differences(self, config: ModelConfig) -> list[str]:
        """Returns the fields that the family cannot express.

        Each entry reads ``"field = value, this one has ..."``.
        """
        return self._to_hf(config)[1]

    def _to_hf(self, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
        """Returns the content of ``config.json``, and the fields that it cannot express."""
        content: dict[str, Any] = {
            "architectures": list(self.architectures[:1]),
            "model_type": self.model_type,
        }
        found: list[str] = []
        writers: list[Callable[[], Mapping[str, Any]]]
        writers = [partial(rule.write, config) for rule in self.custom]
        custom = {name for rule in self.custom for name in rule.fields}
        for entry in dataclasses.fields(config):
            if entry.metadata.get("no_effect"):
                continue
            if entry.name in self.settings:
                writers.append(partial(self.settings[entry.name].write, entry.name, config))
            elif entry.name not in custom:
                writers.append(partial(Constant(default_of(entry)).write, entry.name, config))
        for write in writers:
            try:
                content |= write()
            except UnsupportedFieldError as error:
                found.append(str(error))
        return {**content, **self.exported_constants}, found

    def config_from_hf(self, hf_config: HFConfig) -> ModelConfig:
        """Returns the configuration for a ``config.json``. Dropout rates are no part of a model.

        Raises:
            ConfigError: Settings are unknown or not implemented; the message names all these fields
                and their values.
        """
        refused = [str(error) for error in self._unknown(hf_config)]
        own = {name for rule in self.custom for name in rule.hf_fields}
        others = {name: value for name, value in hf_config.items() if name not in own}
        fields: dict[str, Any] = {}
        try:
            refuse_windows(self.title, others)
        except ConfigError as error:
            refused.append(str(error))
        readers: list[tuple[tuple[str, ...], Callable[[HFConfig], Mapping[str, Any]]]] = [
            (setting.hf_fields, partial(setting.read, self.title, name))
            for name, setting in self.settings.items()
        ]
        readers += [(rule.hf_fields, partial(rule.read, self.title)) for rule in self.custom]
        wrong: set[str] = set()  # a rule relies on earlier checks of the fields that it reads
        for names, read in readers:
            if not wrong.isdisjoint(names):
                continue
            try:
                fields |= read(hf_config)
            except ConfigError as error:
                refused.append(str(error))
                wrong.update(names)
            except (TypeError, AttributeError, OverflowError):  # 3 for a list, or 10 ** 400
                found = {name: hf_config[name] for name in names if name in hf_config}
                shown = " and ".join(f"{n} = {reprlib.repr(v)}" for n, v in found.items())
                refused.append(
                    f"{self.title} models with {shown} are not supported: a value has the wrong "
                    "type or size; use a value that Transformers accepts"
                )
                wrong.update(names)
        if refused:
            raise ConfigError("; ".join(dict.fromkeys(refused)))
        return find_kind(self.kind).config.from_dict(fields)

    def _unknown(self, hf_config: HFConfig) -> Iterator[ConfigError]:
        """Yields the errors for fields that the family does not map and that may have an effect."""
        rules = (*self.settings.values(), *self.custom)
        mapped = {name for rule in rules for name in rule.hf_fields} | WINDOW_FIELDS
        unused = (WITHOUT_EFFECT - self.neutral.keys()) | self.without_effect
        neutral = {**NEUTRAL, "model_type": (self.model_type,), **self.neutral}
        for name, value in hf_config.items():
            if name in mapped or name in unused or value is None:
                continue
            if name == "auto_map" and self._is_published(value):
                continue
            if name not in neutral:
                yield ConfigError(
                    f"{self.title} models with {reprlib.repr(name)} = {reprlib.repr(value)} are "
                    "not supported: the family does not know this field; remove it if it has no "
                    "effect on the model"
                )
            elif not any(type(value) is type(one) and value == one for one in neutral[name]):
                yield unsupported_hf_field(self.title, name, value, list(neutral[name]))

    def _is_published(self, auto_map: object) -> bool:
        return isinstance(auto_map, dict) and auto_map.items() <= self.published_code.items()

    def active_rows(self, config: ModelConfig) -> tuple[Row, ...]:
        """Returns the rows of a model of ``config``, with names for each expert and depth."""
        experts, first = getattr(config, "num_experts", 0), getattr(config, "num_layers", 0)
        depths = range(getattr(config, "mtp_num_layers", 0))
        layers = tuple(str(first + depth) for depth in depths)
        rows: list[Row] = []
        own: list[tuple[Names, tuple[str, ...]]]
        for names, hf_names, *rest in self.rows:
            if DEPTH in "".join(names):
                own = [(_replaced(names, str(m)), (layers[m],)) for m in depths]
            else:
                own = [(names, layers)]
            for ours, numbers in own:
                theirs = _expand(_expand(hf_names, DEPTH, numbers), EXPERT, range(experts))
                if theirs:  # empty for rows of experts in a model without experts
                    rows.append((ours, theirs, *rest))
        return tuple(rows)


def _replaced(names: Names, depth: str) -> Names:
    if isinstance(names, str):
        return names.replace(DEPTH, depth)
    return tuple(name.replace(DEPTH, depth) for name in names)


def _expand(names: tuple[str, ...], word: str, numbers: Iterable[object]) -> tuple[str, ...]:
    """Returns names with a word such as ``{e}`` for every expert: all of expert 0, of 1, ..."""
    if not any(word in name for name in names):
        return names
    return (
        *(name for name in names if word not in name),
        *(name.replace(word, str(n)) for n in numbers for name in names if word in name),
    )
