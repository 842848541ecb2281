"""Rows and settings that families with Mamba-2 layers share.

Their fused projection has the rows of all groups one after another: gates, values, B, C and time
steps. Here the rows of each group are together, so that whole groups are cut.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_models.components.mamba.config import MambaConfig
from megatron_models.families.family import Operation, Row, Where
from megatron_models.families.settings import HFConfig, unsupported_hf_field

_CONVOLVED = ("$mamba_inner_size", "$mamba_states_width", "$mamba_states_width")
_OF_GROUP = ("$mamba_group_width", "$mamba_state_dim", "$mamba_state_dim")
_INFINITE = {"__float__": "Infinity"}
"""transformers' spelling of infinity in a ``config.json``."""


def _by_group(all_rows: tuple[str, ...], rows: tuple[str, ...]) -> tuple[Operation, Operation]:
    """Returns the operations that put the rows of each group together."""
    return (
        ("segments", {"dim": 0, "sizes": list(all_rows)}),
        ("interleave", {"dim": 0, "blocks": "$mamba_num_groups", "sizes": list(rows)}),
    )


_PROJECTED = _by_group(
    ("$mamba_inner_size", *_CONVOLVED, "$mamba_num_heads"),
    ("$mamba_group_width", *_OF_GROUP, "$mamba_heads_per_group"),
)
_MATRIX: Operation = (
    "reshape",
    {"shape": ["$mamba_num_groups", -1, "$hidden_size"], "source": [-1, "$hidden_size"]},
)
_VECTOR: Operation = ("reshape", {"shape": ["$mamba_num_groups", -1], "source": [-1]})
_TAPS: Operation = (
    "reshape",
    {"shape": [-1, "$mamba_conv_kernel"], "source": [-1, 1, "$mamba_conv_kernel"]},
)
_FILTERS: Operation = (
    "reshape",
    {
        "shape": ["$mamba_num_groups", -1, "$mamba_conv_kernel"],
        "source": [-1, "$mamba_conv_kernel"],
    },
)


def mamba_rows(theirs: str, *, where: Where, conv_bias: Where, proj_bias: Where) -> tuple[Row, ...]:
    """Returns the rows of a Mamba-2 layer.

    Args:
        theirs: Start of their names.
        where: The layers that are Mamba-2.
        conv_bias: Those of them whose convolution has a bias.
        proj_bias: Those of them whose projections have biases.
    """
    convolved = _by_group(_CONVOLVED, _OF_GROUP)
    rows: tuple[tuple[str, str, tuple[Operation, ...], Where], ...] = (
        ("A_log", "A_log", (), where),
        ("D", "D", (), where),
        ("dt_bias", "dt_bias", (), where),
        ("in_proj.weight", "in_proj.weight", (*_PROJECTED, _MATRIX), where),
        ("in_proj.bias", "in_proj.bias", (*_PROJECTED, _VECTOR), proj_bias),
        ("conv.weight", "conv1d.weight", (_TAPS, *convolved, _FILTERS), where),
        ("conv.bias", "conv1d.bias", (*convolved, _VECTOR), conv_bias),
        ("norm.weight", "norm.weight", (_VECTOR,), where),
        ("out_proj.weight", "out_proj.weight", (), where),
        ("out_proj.bias", "out_proj.bias", (), proj_bias),
    )
    return tuple(
        (f"layers.{{i}}.mamba.{name}", (f"{theirs}.{other}",), operations, condition)
        for name, other, operations, condition in rows
    )


def limits_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    """Returns the smallest and largest time step; no limit is 0 here and infinite there."""
    found = hf_config.get("time_step_limit", [0.0, math.inf])
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise unsupported_hf_field(title, "time_step_limit", found, ["two numbers"])
    low, high = (math.inf if each == _INFINITE else each for each in found)
    return {"mamba_dt_min": low, "mamba_dt_max": 0.0 if high == math.inf else high}


def limits_to_hf(config: MambaConfig) -> Mapping[str, Any]:
    """Returns the smallest and largest time step in their spelling."""
    return {"time_step_limit": [config.mamba_dt_min, config.mamba_dt_max or _INFINITE]}
