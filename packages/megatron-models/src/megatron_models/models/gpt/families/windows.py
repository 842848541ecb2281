"""Windows and chunks of attention in a ``config.json``: their size, and the layers that have them.

Files name the kind of each layer in ``layer_types``. Older files have a rule of the family instead.
"""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_models.errors import ConfigError
from megatron_models.families.neutral import WINDOWS
from megatron_models.families.settings import (
    Custom,
    HFConfig,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig

LayerRule = Callable[[HFConfig, int], Sequence[bool]]
"""Returns which of so many layers have the window, in a file without ``layer_types``."""

_TYPES: Final = "layer_types"
_SWITCH: Final = "use_sliding_window"
_FULL: Final = "full_attention"
_MOST_LAYERS: Final = 100_000  # the configuration refuses more


def every_layer(hf_config: HFConfig, count: int) -> Sequence[bool]:
    """Returns that every layer has the window."""
    del hf_config
    return [True] * count


def except_every(interval: int, name: str | None = None) -> LayerRule:
    """Returns the rule that every so many layers, counted from 1, one has no window.

    Args:
        interval: The interval.
        name: Their field that replaces it. Defaults to none.
    """

    def rule(hf_config: HFConfig, count: int) -> Sequence[bool]:
        given = None if name is None else hf_config.get(name)
        every = interval if given is None else given
        if type(every) is not int or every < 1:
            raise ConfigError(f"{name} = {reprlib.repr(every)} is not a number of at least 1")
        return [number % every != 0 for number in range(1, count + 1)]

    return rule


def from_layer(first: int, name: str) -> LayerRule:
    """Returns the rule that layers have the window from the one on that a field names.

    Args:
        first: The first layer with a window in a file without the field, counted from 0.
        name: The name of their field.
    """

    def rule(hf_config: HFConfig, count: int) -> Sequence[bool]:
        given = hf_config.get(name, first)
        if type(given) is not int:
            raise ConfigError(f"{name} = {reprlib.repr(given)} is not the number of a layer")
        return [layer >= given for layer in range(count)]

    return rule


@dataclass(frozen=True)
class _Windows:
    """What `windows` takes."""

    rule: LayerRule
    name: str
    absent: int | None
    switch: bool | None
    listed: bool

    @property
    def optional(self) -> bool:
        """Whether models without a window have null as its size."""
        return self.switch is not None or not self.listed

    def read(self, title: str, hf_config: HFConfig) -> Mapping[str, Any]:
        """Returns our fields."""
        size = self._size(title, hf_config)
        windowed = self._windowed(title, hf_config, size)
        if size is None:
            given = hf_config.get(_TYPES)
            if any(windowed) and (given is not None or not self.optional):
                raise ConfigError(
                    f"{title} models with {self.name} = None and windows in {_TYPES} = "
                    f"{reprlib.repr(given)} are not supported; give the window"
                )
            return {}
        if not any(windowed):
            return {}
        return {self.name: size, "window_attn_skip_freq": _pattern(windowed)}

    def write(self, config: GPTConfig) -> Mapping[str, Any]:
        """Returns their fields."""
        size = getattr(config, self.name)
        windowed = config.windowed_layers if size else (False,) * config.num_layers
        if size and not self.listed and not all(windowed):
            raise unsupported_field("window_attn_skip_freq", "''", config.window_attn_skip_freq)
        found: dict[str, Any] = {self.name: size or (None if self.optional else self.absent)}
        if self.listed:
            found[_TYPES] = [WINDOWS[self.name] if each else _FULL for each in windowed]
        if self.switch is not None:
            found[_SWITCH] = bool(size)
        return found

    def _size(self, title: str, hf_config: HFConfig) -> int | None:
        """Returns the size of the window, or None for models without one."""
        if self.switch is not None:
            used = hf_config.get(_SWITCH, self.switch)
            if used not in (None, False, True):
                raise unsupported_hf_field(title, _SWITCH, used, [False, True])
            if not used:
                return None
        size = hf_config.get(self.name, self.absent)
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(
                f"{title} models with {self.name} = {reprlib.repr(size)} are not supported; give a "
                "number of at least 1"
            )
        return size

    def _windowed(self, title: str, hf_config: HFConfig, size: int | None) -> Sequence[bool]:
        """Returns which layers have the window; none if the number of layers is invalid."""
        count = hf_config.get("num_hidden_layers")
        if type(count) is not int or not 0 < count <= _MOST_LAYERS:
            return ()
        types, kind = hf_config.get(_TYPES), WINDOWS[self.name]
        if types is None:
            return self.rule(hf_config, count)
        known = (kind, _FULL) if self.listed else (_FULL if size is None else kind,)
        if (
            not isinstance(types, list)
            or len(types) != count
            or any(each not in known for each in types)
        ):
            raise ConfigError(
                f"{title} models with {_TYPES} = {reprlib.repr(types)} are not supported; give "
                f"{' or '.join(map(repr, known))} for each layer"
            )
        return [each == kind for each in types]


def _pattern(windowed: Sequence[bool]) -> str:
    """Returns the shortest pattern for ``window_attn_skip_freq``."""
    if all(windowed):
        return ""
    every = list(windowed).index(False) + 1
    if list(windowed) == [number % every != 0 for number in range(1, len(windowed) + 1)]:
        return str(every)
    return str([int(each) for each in windowed])


def windows(
    rule: LayerRule = every_layer,
    *,
    name: str = "sliding_window",
    absent: int | None = None,
    switch: bool | None = None,
    listed: bool = True,
    reads: tuple[str, ...] = (),
) -> Custom:
    """Returns the setting of windows, or of chunks, and of the layers that have them.

    Args:
        rule: The layers with a window in a file without ``layer_types``.
        name: Name of the size, theirs and ours: ``sliding_window`` or ``attention_chunk_size``.
        absent: Size in a file without the field.
        switch: Value of ``use_sliding_window`` in a file without the field. None means that the
            family does not have this field.
        listed: Whether the family has ``layer_types``, and layers may differ.
        reads: Further fields that the rule reads.
    """
    setting = _Windows(rule=rule, name=name, absent=absent, switch=switch, listed=listed)
    return Custom(
        fields=(name, "window_attn_skip_freq"),
        hf_fields=(name, _TYPES, *(() if switch is None else (_SWITCH,)), *reads),
        read=setting.read,
        write=setting.write,
    )
