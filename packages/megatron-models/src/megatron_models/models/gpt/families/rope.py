"""Rotary settings of a ``config.json``, in the formats of transformers 4 and 5."""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_models.errors import ConfigError
from megatron_models.families.settings import Custom, HFConfig, unsupported_field
from megatron_models.models.gpt.config import GPTConfig

_LLAMA3: Final = {
    "rope_scaling_factor": "factor",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_original_length": "original_max_position_embeddings",
}
_YARN: Final = {
    "rope_scaling_factor": "factor",
    "rope_scaling_original_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_correction_range_round_to_int": "truncate",
}
_FACTORS: Final = {
    "rope_scaling_short_factors": "short_factor",
    "rope_scaling_long_factors": "long_factor",
}
_MAGNITUDES: Final = ("mscale", "mscale_all_dim")
_FIXED: Final = "rope_scaling_attention_factor"
_ORIGINAL: Final = "original_max_position_embeddings"

_FIELDS: Final = (
    "rotary_base",
    "rope_scaling_type",
    *dict.fromkeys((*_LLAMA3, *_YARN, *_FACTORS, *_MAGNITUDES, _FIXED)),
)
_EVERY_KIND: Final = frozenset({"rope_type", "type", "rope_theta", *_LLAMA3.values()})
_KEYS: Final = {
    "yarn": _EVERY_KIND | {*_YARN.values(), *_MAGNITUDES, "attention_factor"},
    "longrope": _EVERY_KIND | {*_FACTORS.values(), "attention_factor"},
}

ALL_KINDS: Final = ("linear", "dynamic", "llama3", "yarn", "longrope")
"""The types of rotary scaling that transformers computes for every model."""


@dataclass(frozen=True)
class _Rope:
    """What `rope` takes."""

    base: float
    percent: float | None
    kinds: tuple[str, ...]
    latent: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    base_name: str = "rope_theta"
    percent_name: str = "partial_rotary_factor"
    original: int | None = None

    def kind(self, given: Mapping[str, Any]) -> str:
        """Returns the type of scaling. Refuses types that the family does not have."""
        kind = given.get("rope_type") or given.get("type") or "default"
        kind = self.aliases.get(kind, kind) if isinstance(kind, str) else kind
        if kind != "default" and kind not in self.kinds:
            raise ConfigError(
                f"rotary scaling of type {reprlib.repr(kind)} is not supported, only "
                f"{' and '.join(self.kinds) or 'none'}"
            )
        return str(kind)

    def read(self, title: str, hf_config: HFConfig) -> dict[str, Any]:
        """Returns our fields."""
        if self.original is not None:
            hf_config = {_ORIGINAL: self.original, **hf_config}
        given = _rope_parameters(hf_config, self)
        base = given.get("rope_theta")
        fields: dict[str, Any] = {"rotary_base": self.base if base is None else base}
        if self.percent is not None:
            share = given.get("partial_rotary_factor")
            fields["rotary_percent"] = self.percent if share is None else share
        kind = self.kind(given)
        if kind == "default":
            return fields
        fields |= {"rope_scaling_type": kind} | _READERS[kind](title, hf_config, given)
        return _scaled_scores(fields, given) if kind == "yarn" and self.latent else fields

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """Returns their fields."""
        found: dict[str, Any] = {self.base_name: config.rotary_base, "rope_scaling": None}
        if self.percent is not None:
            found[self.percent_name] = config.rotary_percent
        kind = config.rope_scaling_type
        if kind == "none":
            return found
        if kind not in self.kinds:
            known = " or ".join(map(repr, ("none", *self.kinds)))
            raise unsupported_field("rope_scaling_type", known, kind)
        return found | {"rope_scaling": {"rope_type": kind} | _WRITERS[kind](config)}


def _rope_parameters(hf_config: Mapping[str, Any], names: _Rope) -> Mapping[str, Any]:
    """Returns the rotary settings. Refuses settings that are not supported."""
    given = [hf_config[key] for key in ("rope_parameters", "rope_scaling") if hf_config.get(key)]
    maps = [each for each in given if isinstance(each, Mapping)]
    bare = [{key: each[key] for key in each if key != "rope_theta"} for each in maps]
    if len(maps) < len(given) or any(each != bare[0] for each in bare):
        raise ConfigError(
            f"rotary settings are {reprlib.repr(given)}, not one map; give rope_parameters or "
            "rope_scaling"
        )
    settings = bare[0] if bare else {}
    outside = {
        "rope_theta": hf_config.get(names.base_name),
        "partial_rotary_factor": hf_config.get(names.percent_name),
    }
    for key, value in outside.items():
        values = [each for each in (value, *(each.get(key) for each in maps)) if each is not None]
        if others := [each for each in values if each != values[0]]:
            raise ConfigError(
                f"{key} is {reprlib.repr(values[0])} and {reprlib.repr(others[0])} in the rotary "
                "settings"
            )
        if values and (key in settings or key == "rope_theta" or names.percent is not None):
            settings[key] = values[0]
    known = _KEYS.get(names.kind(settings), _EVERY_KIND)
    for key, value in settings.items():
        share = key == "partial_rotary_factor" and (names.percent is not None or value == 1)
        if key not in known and not share and value is not None:
            raise ConfigError(
                f"rotary settings with {reprlib.repr(key)} = {reprlib.repr(value)} are not "
                "supported"
            )
    return settings


def _required(title: str, given: Mapping[str, Any], name: str) -> Any:
    if given.get(name) is None:
        raise ConfigError(f"the {title} configuration's rotary scaling lacks {name!r}")
    return given[name]


def _original_length(hf_config: HFConfig, given: Mapping[str, Any]) -> Any:
    """Returns the original length, by default the number of positions.

    A value outside the rotary settings takes precedence, as in transformers.
    """
    for each in (hf_config.get(_ORIGINAL), given.get(_ORIGINAL)):
        if each is not None:
            return each
    return hf_config.get("max_position_embeddings")


def _stretched(hf_config: HFConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that YaRN and LongRoPE share.

    The factor is by default the ratio of the number of positions to the original length.
    """
    original = _original_length(hf_config, given)
    factor, positions = given.get("factor"), hf_config.get("max_position_embeddings")
    if factor is None:
        if type(original) is not int or type(positions) is not int or original < 1:
            raise ConfigError(
                "rotary scaling without a factor needs max_position_embeddings and "
                f"{_ORIGINAL}, not {reprlib.repr(positions)} and {reprlib.repr(original)}"
            )
        factor = positions / original
    fields = {"rope_scaling_original_length": original, "rope_scaling_factor": factor}
    fixed = given.get("attention_factor")
    if fixed == 0:
        raise ConfigError("rotary settings with attention_factor = 0 are not supported")
    return fields if fixed is None else fields | {_FIXED: fixed}


def _read_linear(title: str, hf_config: HFConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_scaling_factor": _required(title, given, "factor")}


def _read_dynamic(title: str, hf_config: HFConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope_scaling_factor": _required(title, given, "factor"),
        "rope_scaling_original_length": hf_config.get("max_position_embeddings"),
    }


def _read_llama3(title: str, hf_config: HFConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    original = hf_config.get(_ORIGINAL)
    given = given if original is None else {**given, _ORIGINAL: original}
    return {name: _required(title, given, hf_name) for name, hf_name in _LLAMA3.items()}


def _read_yarn(title: str, hf_config: HFConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    fields = _stretched(hf_config, given)
    for name in ("yarn_beta_fast", "yarn_beta_slow"):
        if given.get(_YARN[name]):  # transformers takes 0 as absent
            fields[name] = given[_YARN[name]]
    if given.get("truncate") is not None:
        fields["yarn_correction_range_round_to_int"] = given["truncate"]
    magnitudes = {name: given.get(name) for name in _MAGNITUDES}
    if _FIXED not in fields and all(magnitudes.values()):
        return fields | magnitudes
    return fields


def _scaled_scores(fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of YaRN for latent attention, whose scores ``mscale_all_dim`` scales.

    It does so without ``mscale``, or beside an attention factor, too.
    """
    if not given.get("mscale_all_dim") or "mscale_all_dim" in fields:
        return fields
    fields = {_FIXED: _attention_factor(fields["rope_scaling_factor"])} | fields
    return fields | {"mscale_all_dim": given["mscale_all_dim"]}


def _attention_factor(factor: Any) -> float:
    """Returns YaRN's factor of cosines and sines without ``mscale`` and ``mscale_all_dim``."""
    return 0.1 * math.log(factor) + 1.0 if type(factor) in (int, float) and factor > 1 else 1.0


def _read_longrope(title: str, hf_config: HFConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    fields = _stretched(hf_config, given)
    for name, hf_name in _FACTORS.items():
        factors = _required(title, given, hf_name)
        if not isinstance(factors, list) or any(type(x) not in (int, float) for x in factors):
            raise ConfigError(
                f"{hf_name} of the rotary settings is {reprlib.repr(factors)}, not a list of "
                "numbers"
            )
        fields[name] = ",".join(repr(float(x)) for x in factors)
    return fields


def _write_linear(config: GPTConfig) -> dict[str, Any]:
    return {"factor": config.rope_scaling_factor}


def _write_dynamic(config: GPTConfig) -> dict[str, Any]:
    original, positions = config.rope_scaling_original_length, config.max_position_embeddings
    if original != positions:
        raise unsupported_field("rope_scaling_original_length", repr(positions), original)
    return {"factor": config.rope_scaling_factor}


def _write_llama3(config: GPTConfig) -> dict[str, Any]:
    return {hf_name: getattr(config, name) for name, hf_name in _LLAMA3.items()}


def _write_yarn(config: GPTConfig) -> dict[str, Any]:
    found = {hf_name: getattr(config, name) for name, hf_name in _YARN.items()}
    magnitudes = {name: getattr(config, name) for name in _MAGNITUDES}
    fixed = config.rope_scaling_attention_factor
    if fixed:
        found["attention_factor"] = fixed
    if fixed and config.mscale_all_dim:  # mscale has no effect beside a fixed factor
        return found | {"mscale_all_dim": config.mscale_all_dim}
    if all(magnitudes.values()):
        return found | magnitudes
    if not fixed and magnitudes != {"mscale": 1.0, "mscale_all_dim": 0.0}:
        raise unsupported_field(
            "mscale and mscale_all_dim", "1.0 and 0.0, or both above 0", tuple(magnitudes.values())
        )
    return found


def _write_longrope(config: GPTConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "factor": config.rope_scaling_factor,
        _ORIGINAL: config.rope_scaling_original_length,
    }
    for name, hf_name in _FACTORS.items():
        found[hf_name] = [float(each) for each in getattr(config, name).split(",")]
    fixed = config.rope_scaling_attention_factor
    return found | ({"attention_factor": fixed} if fixed else {})


_READERS: Final[Mapping[str, Callable[[str, HFConfig, Mapping[str, Any]], dict[str, Any]]]] = {
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}
_WRITERS: Final[Mapping[str, Callable[[GPTConfig], dict[str, Any]]]] = {
    "linear": _write_linear,
    "dynamic": _write_dynamic,
    "llama3": _write_llama3,
    "yarn": _write_yarn,
    "longrope": _write_longrope,
}


def rope(
    base: float,
    *,
    kinds: tuple[str, ...] = ALL_KINDS,
    percent: float | None = None,
    latent: bool = False,
    aliases: Mapping[str, str] | None = None,
    base_name: str = "rope_theta",
    percent_name: str = "partial_rotary_factor",
    original: int | None = None,
) -> Custom:
    """Returns the setting of rotary positions, with or without scaling.

    Args:
        base: Base of a file without one.
        kinds: Types of scaling that models of the family may have.
        percent: Rotated fraction of a head in a file without one. None means that the family always
            rotates whole heads; a file with another fraction is then refused.
        latent: Whether attention is multi-latent, whose scores YaRN scales.
        aliases: Other names of types in the family's files, such as ``{"su": "longrope"}``.
        base_name: Name of the base outside the rotary settings.
        percent_name: Name of the rotated fraction outside the rotary settings.
        original: Original length of a file without one. Defaults to its number of positions.
    """
    names = _Rope(
        base=base,
        percent=percent,
        kinds=kinds,
        latent=latent,
        aliases=aliases or {},
        base_name=base_name,
        percent_name=percent_name,
        original=original,
    )
    share = percent is not None
    return Custom(
        fields=(*_FIELDS, *(("rotary_percent",) if share else ())),
        hf_fields=(
            *(base_name, "rope_scaling", "rope_parameters", _ORIGINAL),
            *((percent_name,) if share else ()),
        ),
        read=names.read,
        write=names.write,
    )
