"""Settings of single layers, read from JSON. Importing this module does not import torch.

The format is that of Megatron-LM and of Nemotron-NAS models on Hugging Face: a list of blocks, or a
map with this list under ``block_configs``. A block has settings of ``attention`` and of ``mlp``
(or ``ffn``).
"""

import difflib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_parallel.nearest import nearest_divisors

from megatron_models.errors import ConfigError

ATTENTION_FIELDS: Final = ("num_attention_heads", "num_query_groups", "kv_channels")
"""Fields of attention that a block may change."""
DENSE_FIELDS: Final = ("ffn_hidden_size",)
"""Fields of a dense feed-forward layer that a block may change."""
EXPERT_FIELDS: Final = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
)
"""Fields of experts that a block may change."""

_COMMON: Final = ("no_op", "replace_with_linear", "module")
_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": (*_COMMON, *ATTENTION_FIELDS, "n_heads_in_group"),
    "mlp": (*_COMMON, "kind", *DENSE_FIELDS, *EXPERT_FIELDS, "ffn_mult"),
}
_UNUSED: Final = (
    *("num_sink_tokens", "sparsify", "unshifted_sink", "window_length"),
    *("use_prefill_window_in_sink_attention", "prefill_sliding_window", "llama4"),
)
"""Entries of published files that are accepted if they are switched off."""
_KINDS: Final = {"dense": False, "moe": True}
_MULTIPLE: Final = 256
"""Widths from ``ffn_mult`` are rounded up to a multiple of this."""


@dataclass(frozen=True)
class Part:
    """How one sublayer of a layer differs from those of the model.

    Attributes:
        no_op: Whether the layer does not have the sublayer.
        replace_with_linear: Whether a linear layer takes its place.
        module: ``package.module:Class`` of another mixer's description. Empty: that of the model.
        experts: Whether a feed-forward layer has experts. None: as in the model.
        changes: Values of fields that differ.
    """

    no_op: bool = False
    replace_with_linear: bool = False
    module: str = ""
    experts: bool | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


UNCHANGED: Final = Part()


@dataclass(frozen=True)
class Block:
    """How the sublayers of one layer differ from those of the model."""

    attention: Part = UNCHANGED
    mlp: Part = UNCHANGED


def read_blocks(text: str, hidden_size: int, heads: int) -> tuple[Block, ...]:
    """Returns the blocks of a JSON text, one for each layer.

    Args:
        text: JSON text.
        hidden_size: Width of the residual stream, for ``ffn_mult``.
        heads: Query heads of the model, for ``n_heads_in_group``.

    Raises:
        ConfigError: The text is no list of blocks. The message names the layer and the entry.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}; {_REMEDY}") from None
    except RecursionError:
        raise ConfigError(f"nested too deeply; {_REMEDY}") from None
    if isinstance(found, dict):
        found = found.get("block_configs")
    if not isinstance(found, list):
        raise ConfigError(f"neither a list nor a map with the list block_configs; {_REMEDY}")
    return tuple(_block(each, number, hidden_size, heads) for number, each in enumerate(found))


_REMEDY: Final = "give one map for each layer, such as {'attention': {'no_op': true}}".replace(
    "'", '"'
)


def _block(found: Any, number: int, hidden_size: int, heads: int) -> Block:
    where = f"layer {number}"
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {reprlib.repr(found)}, not a map of attention and mlp")
    for key in found:
        if key not in ("attention", "mlp", "ffn"):
            raise ConfigError(f"{where}: unknown key {reprlib.repr(key)}; use attention or mlp")
    if "mlp" in found and "ffn" in found:
        raise ConfigError(f"{where} has both mlp and ffn, which mean the same; leave one out")
    attention = _part("attention", found.get("attention"), where, heads)
    mlp = _part("mlp", found.get("mlp", found.get("ffn")), where, heads, hidden_size)
    if attention.no_op and mlp.no_op:
        raise ConfigError(f"{where} has neither attention nor mlp; leave the layer out")
    return Block(attention, mlp)


def _part(name: str, found: Any, layer: str, heads: int, hidden_size: int = 0) -> Part:
    where = f"{layer}, {name}"
    if found is None:
        return UNCHANGED
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {reprlib.repr(found)}, not a map")
    given = {key: value for key, value in found.items() if value is not None}
    for key in _UNUSED:
        if given.get(key) is False:
            del given[key]
    flags = [_switch(given, key, where) for key in ("no_op", "replace_with_linear")]
    module, kind = given.pop("module", ""), given.pop("kind", None)
    if not isinstance(module, str):
        raise ConfigError(f"{where}: module is {reprlib.repr(module)}, not package.module:Class")
    if kind is not None and (name != "mlp" or kind not in _KINDS):
        raise ConfigError(f"{where}: kind is {reprlib.repr(kind)}; kinds of mlp are dense and moe")
    if not module:  # a module of its own may have any fields
        _check_keys(name, given, where)
        _derive(given, where, heads, hidden_size)
    if sum((*flags, bool(module))) > 1:
        raise ConfigError(f"{where}: no_op, replace_with_linear and module exclude each other")
    if any(flags) and (given or kind):
        entry = next(iter(given), "kind")
        raise ConfigError(f"{where}: {entry} has no effect with no_op or replace_with_linear")
    if module and kind:
        raise ConfigError(f"{where}: kind has no effect with module; leave one out")
    experts = None if kind is None else _KINDS[kind]
    return Part(flags[0], flags[1], module, experts, given)


def _switch(given: dict[str, Any], key: str, where: str) -> bool:
    value = given.pop(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} must be true or false, not {reprlib.repr(value)}")
    return value


def _check_keys(name: str, given: Mapping[str, Any], where: str) -> None:
    for key in given:
        if key not in _KNOWN[name]:
            near = difflib.get_close_matches(key, _KNOWN[name], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(_KNOWN[name])}"
            raise ConfigError(f"{where}: unknown key {reprlib.repr(key)}; {hint}")


def _divisors(heads: Any, each: Any) -> str:
    """Returns the heads of a group that are next to an invalid value."""
    if type(heads) is not int or type(each) is not int or heads < 1:
        return "an integer that does"
    return nearest_divisors(heads, each)


def _derive(given: dict[str, Any], where: str, heads: int, hidden_size: int) -> None:
    """Replaces sizes in the units of Nemotron-NAS by fields."""
    for key, name in (("n_heads_in_group", "num_query_groups"), ("ffn_mult", "ffn_hidden_size")):
        if key in given and name in given:
            raise ConfigError(f"{where}: {key} and {name} exclude each other; leave one out")
    if "n_heads_in_group" in given:
        each = given.pop("n_heads_in_group")
        own = given.get("num_attention_heads", heads)
        if type(each) is not int or type(own) is not int or each < 1 or own % each:
            raise ConfigError(
                f"{where}: n_heads_in_group is {reprlib.repr(each)}, which does not divide the "
                f"heads ({reprlib.repr(own)}); use {_divisors(own, each)}"
            )
        given["num_query_groups"] = own // each
    if "ffn_mult" in given:
        factor = given.pop("ffn_mult")
        if type(factor) not in (int, float) or not 0 < factor < 2**20:
            raise ConfigError(
                f"{where}: ffn_mult must be a positive number below 2^20, not "
                f"{reprlib.repr(factor)}; 4 is usual"
            )
        width = int(2 * factor * hidden_size / 3)
        given["ffn_hidden_size"] = -(-width // _MULTIPLE) * _MULTIPLE
