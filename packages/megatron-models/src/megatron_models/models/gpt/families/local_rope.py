"""Rotary settings of a ``config.json`` with a base of their own for layers that have a window.

transformers 5 has a map for each type of layer in ``rope_parameters``. In files of transformers 4,
``rope_theta`` and ``rope_scaling`` are those of the full layers. The base of layers with a window
is a field of its own (Gemma 3) or the same (OLMo-3), and their frequencies are not scaled.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron_models.errors import ConfigError
from megatron_models.families.settings import Custom, HFConfig
from megatron_models.models.gpt.config import GPTConfig

_FULL: Final = "full_attention"
_LOCAL: Final = "sliding_attention"
_MAPS: Final = "rope_parameters"
_BASE: Final = "rope_theta"


@dataclass(frozen=True)
class _LocalRope:
    """What `local_rope` takes."""

    rope: Custom
    base: float
    name: str | None

    def read(self, title: str, hf_config: HFConfig) -> Mapping[str, Any]:
        """Returns our fields."""
        maps = _maps(title, hf_config)
        fields = self.rope.read(title, {**hf_config, _MAPS: maps.get(_FULL)})
        types = hf_config.get("layer_types")
        if isinstance(types, list) and _LOCAL not in types:
            return fields
        given = maps.get(_LOCAL) or {}
        local = self.rope.read(title, self._local(title, hf_config, given))
        if local == fields:
            return fields
        base = local["rotary_base"]
        if not base or local != {"rotary_base": base}:
            raise ConfigError(
                f"{title} models with rotary settings {reprlib.repr(given)} of {_LOCAL} are not "
                f"supported, only those of {_FULL} or another base without scaling"
            )
        return {**fields, "rotary_base_local": base}

    def write(self, config: GPTConfig) -> Mapping[str, Any]:
        """Returns their fields, for both versions of transformers."""
        found = self.rope.write(config)
        full = {"rope_type": "default", _BASE: config.rotary_base, **(found["rope_scaling"] or {})}
        local = {"rope_type": "default", _BASE: config.rotary_base_local}
        local = local if config.rotary_base_local else dict(full)
        outside = {} if self.name is None else {self.name: local[_BASE]}
        return {**found, **outside, _MAPS: {_FULL: full, _LOCAL: local}}

    def _local(self, title: str, hf_config: HFConfig, given: Mapping[str, Any]) -> HFConfig:
        """Returns a ``config.json`` with the settings of layers with a window for all layers."""
        outside = None if self.name is None else hf_config.get(self.name)
        base = given.get(_BASE)
        if self.name is None and base is None and hf_config.get(_BASE) not in (None, self.base):
            raise ConfigError(
                f"{title} models with {_BASE} = {reprlib.repr(hf_config[_BASE])} and no base of "
                f"{_LOCAL} are not supported, since versions of transformers differ; give both "
                f"in {_MAPS}"
            )
        if base is None:
            base = self.base if outside is None else outside
        return {
            **hf_config,
            _BASE: outside,
            "rope_scaling": None,
            _MAPS: {**given, _BASE: base},
        }


def _maps(title: str, hf_config: HFConfig) -> Mapping[str, Mapping[str, Any] | None]:
    """Returns the settings of each type of layer. Refuses settings without types."""
    maps = hf_config.get(_MAPS)
    if maps is None:
        return {}
    if (
        not isinstance(maps, Mapping)
        or maps.keys() - {_FULL, _LOCAL}
        or not all(each is None or isinstance(each, Mapping) for each in maps.values())
    ):
        raise ConfigError(
            f"{title} models with {_MAPS} = {reprlib.repr(maps)} are not supported; give a map for "
            f"each of {_FULL} and {_LOCAL}"
        )
    return maps


def local_rope(rope: Custom, *, base: float, name: str | None = None) -> Custom:
    """Returns the setting of rotary positions if layers with a window have another base.

    Args:
        rope: The setting of the other layers, with `rope`'s default names and whole heads.
        base: Base of layers with a window in a file without one.
        name: Their field with this base in files of transformers 4. None means that these had one
            base for all layers.
    """
    setting = _LocalRope(rope=rope, base=base, name=name)
    # transformers reads the original length from the maps only.
    hf_fields = tuple(each for each in rope.hf_fields if each != "original_max_position_embeddings")
    return Custom(
        fields=(*rope.fields, "rotary_base_local"),
        hf_fields=(*hf_fields, *(() if name is None else (name,))),
        read=setting.read,
        write=setting.write,
    )
