"""Coordinates of ranks on the grids of a layout, and the stages of pipeline ranks."""

from typing import Literal, NamedTuple

from megatron_parallel.errors import LayoutError

StageMapping = Literal["loop", "v"]
"""Stages of a pipeline rank: every `pp`-th one ("loop"), or one from each end ("v")."""


class Coordinates(NamedTuple):
    """Coordinates of a rank on the dense grid."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    """Coordinates of a rank on the expert grid; `tp` and `dp` are those of the experts."""

    tp: int
    ep: int
    dp: int
    pp: int


def stages_of(stage_mapping: StageMapping, pp: int, vpp: int, index: int) -> tuple[int, ...]:
    """Returns the stages of pipeline rank `index`, ascending."""
    if not 0 <= index < pp:
        raise LayoutError(f"pipeline rank {index} does not exist: pp={pp}")
    return (
        (index, 2 * pp - 1 - index) if stage_mapping == "v" else tuple(range(index, pp * vpp, pp))
    )
