"""Names of process groups, and the axes along which the ranks of each group differ."""

import difflib
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from megatron_parallel.errors import LayoutError


class GroupKind(NamedTuple):
    """Definition of the groups of one name.

    Attributes:
        grid: `dense`, `expert`, `stages` (some ranks of a pipeline), or one of `NESTED`.
        axes: Axes of that grid along which the ranks of a group differ. For `stages` its pipeline
            ranks: numbers, `first`, or `last` for the rank of the last stage.
        purpose: One line on the use of the group.
        size: Ranks in a group of a pool.
    """

    grid: str
    axes: tuple[str, ...]
    purpose: str
    size: int = 0


GROUPS: Final = {
    "tp": GroupKind("dense", ("tp",), "tensor parallel: one layer cut over its ranks"),
    "cp": GroupKind("dense", ("cp",), "context parallel: one sequence cut over its ranks"),
    "cp_inner": GroupKind("nested cp", ("inner",), "context parallel: all-to-all of heads"),
    "cp_outer": GroupKind("nested cp", ("outer",), "context parallel: ring of keys and values"),
    "dp": GroupKind("dense", ("dp",), "data parallel: replicas with different samples"),
    "pp": GroupKind("dense", ("pp",), "pipeline parallel: the stages of one replica"),
    "dp_cp": GroupKind("dense", ("dp", "cp"), "sum of the gradients of dense parameters"),
    "dp_cp_inner": GroupKind(
        "nested dp", ("inner",), "near data-parallel ranks, which hold all shards"
    ),
    "dp_cp_outer": GroupKind("nested dp", ("outer",), "ranks with the same shard in each instance"),
    "tp_cp": GroupKind("dense", ("tp", "cp"), "one micro-batch on one pipeline rank"),
    "tp_dp": GroupKind("dense", ("tp", "dp"), "one pipeline rank at one cp coordinate"),
    "tp_dp_cp": GroupKind("dense", ("tp", "dp", "cp"), "one pipeline rank of all replicas"),
    "model": GroupKind("dense", ("tp", "pp"), "one replica of the model"),
    "ep": GroupKind("expert", ("ep",), "expert parallel: the experts of one layer"),
    "expert_tp": GroupKind("expert", ("tp",), "tensor parallel inside one expert"),
    "expert_dp": GroupKind("expert", ("dp",), "sum of the gradients of experts"),
    "expert_tp_ep": GroupKind("expert", ("tp", "ep"), "all experts of one layer"),
    "expert_tp_ep_pp": GroupKind("expert", ("tp", "ep", "pp"), "one replica of all experts"),
    "embedding": GroupKind(
        "stages", ("first", "last"), "holders of tied embeddings: first and last stage"
    ),
    "position_embedding": GroupKind(
        "stages", ("first",), "holders of position embeddings: first stage"
    ),
    "world": GroupKind("dense", ("tp", "cp", "dp", "pp"), "every rank"),
}
"""Definitions of all groups, except those of a pool (`pool_group_name`) and those that a model adds
(`stage_group_name`)."""

NESTED: Final = {"nested cp": ("cp",), "nested dp": ("dp", "cp"), "pool": ("dp", "cp")}
"""Axes whose groups are split again: into inner and outer groups, or into groups of one size."""

_ALIASES: Final = {"tp_pp": "model", "tp_ep": "expert_tp_ep", "tp_ep_pp": "expert_tp_ep_pp"}
_POOL: Final = "hybrid_cp_"
_STAGES: Final = "stages_"


def pool_group_name(size: int) -> str:
    """Returns the name of the groups of `size` neighbouring ranks of a pool."""
    return f"{_POOL}{size}"


def stage_group_name(pipeline_ranks: Iterable[int]) -> str:
    """Returns the name of the groups of some pipeline ranks: `stages_0_2` for ranks 0 and 2."""
    return _STAGES + "_".join(map(str, sorted(set(pipeline_ranks))))


def group_kind(name: str) -> GroupKind:
    """Returns the definition of the groups of a name.

    Raises:
        LayoutError: No group has that name.
    """
    if (named := GROUPS.get(_ALIASES.get(name, name))) is not None:
        return named
    found = re.fullmatch(rf"{_POOL}([1-9]\d*)", name)
    size = int(found[1]) if found else 0
    if found and size & (size - 1) == 0:
        return GroupKind(
            "pool", (), "documents of a pool that are cut over this number of ranks", size
        )
    if re.fullmatch(rf"{_STAGES}\d+(_\d+)*", name):
        holders = tuple(name.removeprefix(_STAGES).split("_"))
        return GroupKind("stages", holders, "holders of parameters that these pipeline ranks share")
    known = [*GROUPS, *_ALIASES, *(pool_group_name(2**power) for power in range(1, 4))]
    near = difflib.get_close_matches(name, known)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise LayoutError(f"no group is called {name!r}: {hint}")


def describe_group(name: str) -> str:
    """Returns one line on the use of the groups of a name."""
    return group_kind(name).purpose


def canonical_group_name(name: str) -> str:
    """Returns the canonical name of a group: `model` for `tp_pp`."""
    group_kind(name)
    return _ALIASES.get(name, name)
