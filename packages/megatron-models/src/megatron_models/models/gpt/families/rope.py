"""Rotary settings of a ``config.json``, in the formats of transformers 4 and 5."""

import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.settings import Custom, HFConfig
from megatron_models.models.gpt.config import GPTConfig

_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_parameters(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the rotary settings. Refuses settings that are not supported."""
    given = [hf_config[key] for key in ("rope_parameters", "rope_scaling") if hf_config.get(key)]
    maps = [each for each in given if isinstance(each, Mapping)]
    bare = [{key: each[key] for key in each if key != "rope_theta"} for each in maps]
    if len(maps) < len(given) or any(each != bare[0] for each in bare):
        raise ConfigError(
            f"rotary settings are {reprlib.repr(given)}, not one map; give rope_parameters or "
            "rope_scaling"
        )
    bases = [
        each["rope_theta"] for each in (hf_config, *maps) if each.get("rope_theta") is not None
    ]
    other_bases = [base for base in bases if base != bases[0]]
    if other_bases:
        raise ConfigError(
            f"rope_theta is {reprlib.repr(bases[0])} and {reprlib.repr(other_bases[0])} in the "
            "rotary settings"
        )
    settings = bare[0] if bare else {}
    if bases:
        settings["rope_theta"] = bases[0]
    for key, value in settings.items():
        neutral = value is None or (key == "partial_rotary_factor" and value == 1)
        if key not in _ROPE_KEYS and not neutral:
            raise ConfigError(
                f"rotary settings with {reprlib.repr(key)} = {reprlib.repr(value)} are not "
                "supported"
            )
    return settings


_LLAMA3 = {
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_original_length": "original_max_position_embeddings",
}


def _from_hf(title: str, hf_config: HFConfig, *, base: float) -> dict[str, Any]:
    scaling = _rope_parameters(hf_config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    rope_theta = scaling.get("rope_theta")
    settings: dict[str, Any] = {"rotary_base": base if rope_theta is None else rope_theta}
    if kind == "default":
        return settings
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"rotary scaling of type {reprlib.repr(kind)} is not supported, only linear and llama3"
        )
    read = {"rope_scaling_factor": "factor", **(_LLAMA3 if kind == "llama3" else {})}
    for field, hf_name in read.items():
        if scaling.get(hf_name) is None:
            raise ConfigError(f"the {title} configuration's rotary scaling lacks {hf_name!r}")
        settings[field] = scaling[hf_name]
    return settings | {"rope_scaling_type": kind}


def _to_hf(config: GPTConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_scaling": None}
    if config.rope_scaling_type == "none":
        return settings
    scaling = {"rope_type": config.rope_scaling_type, "factor": config.rope_scaling_factor}
    if config.rope_scaling_type == "llama3":
        scaling |= {hf_name: getattr(config, field) for field, hf_name in _LLAMA3.items()}
    return settings | {"rope_scaling": scaling}


def rope(base: float) -> Custom:
    """Returns the setting of rotary positions over whole heads, with or without scaling.

    Args:
        base: Base of a file without one.
    """
    return Custom(
        fields=("rotary_base", "rope_scaling_type", "rope_scaling_factor", *_LLAMA3),
        hf_fields=("rope_theta", "rope_scaling", "rope_parameters"),
        read=partial(_from_hf, base=base),
        write=_to_hf,
    )
