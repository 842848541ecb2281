"""The process groups of a layout by name: along which axes of which grid their members differ."""

import difflib
import re
from typing import Final, NamedTuple

from megatron_parallel.errors import LayoutError


class GroupKind(NamedTuple):
    """What tells the groups of one name from others.

    Attributes:
        grid: `dense`, `expert`, `stages` of a pipeline, or one of `NESTED`.
        axes: of that grid along which members differ.
        purpose: one line on what the group is for.
        size: ranks of one of the groups that a pool is cut into.
    """

    grid: str
    axes: tuple[str, ...]
    purpose: str
    size: int = 0


GROUPS: Final = {
    "tp": GroupKind("dense", ("tp",), "tensor parallel: one layer cut over its ranks"),
    "cp": GroupKind("dense", ("cp",), "context parallel: one sequence cut over its ranks"),
    "cp_inner": GroupKind(
        "nested cp", ("inner",), "context parallel: heads are scattered over these"
    ),
    "cp_outer": GroupKind(
        "nested cp", ("outer",), "context parallel: a ring goes round over these"
    ),
    "dp": GroupKind("dense", ("dp",), "data parallel: copies that see different samples"),
    "pp": GroupKind("dense", ("pp",), "pipeline parallel: one copy of the model, stage by stage"),
    "dp_cp": GroupKind("dense", ("dp", "cp"), "gradients of dense parameters are summed here"),
    "dp_cp_inner": GroupKind("nested dp", ("inner",), "near data parallel ranks: shards lie here"),
    "dp_cp_outer": GroupKind("nested dp", ("outer",), "the same shard of every instance"),
    "tp_cp": GroupKind("dense", ("tp", "cp"), "one micro-batch on one stage"),
    "tp_dp": GroupKind("dense", ("tp", "dp"), "one pipeline stage at one context position"),
    "tp_dp_cp": GroupKind("dense", ("tp", "dp", "cp"), "one whole pipeline stage"),
    "model": GroupKind("dense", ("tp", "pp"), "one copy of the model"),
    "ep": GroupKind("expert", ("ep",), "expert parallel: the experts of one layer"),
    "expert_tp": GroupKind("expert", ("tp",), "tensor parallel inside one expert"),
    "expert_dp": GroupKind("expert", ("dp",), "gradients of experts are summed here"),
    "expert_tp_ep": GroupKind("expert", ("tp", "ep"), "all experts of one layer"),
    "expert_tp_ep_pp": GroupKind("expert", ("tp", "ep", "pp"), "one copy of all experts"),
    "embedding": GroupKind(
        "stages", ("first", "last"), "holders of tied embeddings: first and last stage"
    ),
    "position_embedding": GroupKind(
        "stages", ("first",), "holders of position embeddings: first stage"
    ),
    "world": GroupKind("dense", ("tp", "cp", "dp", "pp"), "every rank"),
}
"""Every group with a name of its own; those of a pool are `pool_group_name`'s."""

NESTED: Final = {"nested cp": ("cp",), "nested dp": ("dp", "cp"), "pool": ("dp", "cp")}
"""Axes whose groups are cut once more: into inner groups and outer ones across them, or evenly."""

_ALIASES: Final = {"tp_pp": "model", "tp_ep": "expert_tp_ep", "tp_ep_pp": "expert_tp_ep_pp"}
_POOL: Final = "hybrid_cp_"


def pool_group_name(size: int) -> str:
    """The group of `size` neighbouring ranks of a pool, over which a long document may be cut."""
    return f"{_POOL}{size}"


def group_kind(name: str) -> GroupKind:
    """What the groups of a name are; raises `LayoutError`, with the nearest name, if none are."""
    if (named := GROUPS.get(_ALIASES.get(name, name))) is not None:
        return named
    found = re.fullmatch(rf"{_POOL}([1-9]\d*)", name)
    size = int(found[1]) if found else 0
    if found and size & (size - 1) == 0:
        return GroupKind("pool", (), "documents of a pool that are cut over so many ranks", size)
    known = [*GROUPS, *_ALIASES, *(pool_group_name(2**power) for power in range(1, 4))]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise LayoutError(f"no group is called {name!r}: {hint}")


def describe_group(name: str) -> str:
    """One line on what the group of that name is for."""
    return group_kind(name).purpose


def canonical_group_name(name: str) -> str:
    """Returns the name under which a group is listed: `model` for `tp_pp`."""
    group_kind(name)
    return _ALIASES.get(name, name)
