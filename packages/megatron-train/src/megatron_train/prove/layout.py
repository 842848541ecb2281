"""Small layouts in which every axis of a layout still divides something.

Importing this module does not import torch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final

from megatron_parallel import LayoutError, ParallelLayout

from megatron_train.errors import TrainError

MAX_STAGES: Final = 8
"""Pipeline stages of a small layout, at most."""

_MAX_DATA: Final = 16
"""Largest data-parallel size that is tried."""


def small_layout(layout: ParallelLayout, max_ranks: int, least_tp: int = 2) -> ParallelLayout:
    """Returns a layout with the axes of another one and at most ``max_ranks`` ranks.

    Each axis and each group of experts or copies that has several ranks keeps at least two. Degrees
    divide those of the layout. Data parallelism is as small as possible. The others are as large as
    possible, first the pipeline's up to 4, so that it has stages in the middle.

    Args:
        layout: A resolved layout.
        max_ranks: Maximum number of ranks.
        least_tp: Smallest tensor-parallel size, unless that of the layout is smaller.

    Raises:
        TrainError: All such layouts have more ranks. The message has the smallest number.
    """
    found = [*_candidates(layout, least_tp)] or [layout]
    fitting = [each for each in found if each.world_size <= max_ranks]
    if not fitting:
        least = min(each.world_size for each in found)
        raise TrainError(
            f"--max-ranks {max_ranks} is too small for a proof in which each axis of {layout} has "
            f"2 ranks or more; give --max-ranks {least}"
        )
    return max(fitting, key=_preference)


def _preference(layout: ParallelLayout) -> tuple[int, ...]:
    """Returns what is better if it is larger."""
    dp = layout.dp or 1
    model = layout.tp * layout.cp * layout.pp
    stages = layout.pp * layout.vpp
    return min(layout.pp, 4), model // dp, -dp, layout.ep, -abs(stages - MAX_STAGES), layout.tp


def _candidates(layout: ParallelLayout, least_tp: int) -> Iterator[ParallelLayout]:
    kept = _has_several(layout)
    data = layout.dp or 1
    for tp, cp, pp, ep, etp in product(
        _degrees(layout.tp, least_tp),
        _degrees(layout.cp),
        range(2, min(layout.pp, 4) + 1) if layout.pp > 1 else (1,),
        _degrees(layout.ep),
        (None,) if layout.etp is None else _degrees(layout.etp),
    ):
        chunks = MAX_STAGES // pp if layout.stage_mapping == "loop" else 2
        for dp, outer in product(
            range(1 + (data > 1), min(data, _MAX_DATA) + 1),
            range(2, 3) if layout.dp_outer > 1 else (1,),
        ):
            try:
                small = replace(
                    layout,
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    ep=ep,
                    etp=etp,
                    dp=dp,
                    vpp=min(layout.vpp, chunks),
                    dp_outer=outer,
                    hierarchical_cp=_two_levels(layout, cp),
                )
                if _has_several(small) == kept:
                    yield small
            except LayoutError:
                continue


def _degrees(degree: int, floor: int = 2) -> list[int]:
    """Returns the divisors of a degree that cut something."""
    return [d for d in range(min(degree, floor), degree + 1) if degree % d == 0]


def _two_levels(layout: ParallelLayout, cp: int) -> tuple[int, ...] | None:
    """Returns inner and outer size of a smaller context-parallel group, or None without levels."""
    if layout.hierarchical_cp is None:
        return None
    inner, outer = layout.hierarchical_cp
    small = math.gcd(inner, cp // min(outer, 2)) if outer > 1 else cp
    return small, cp // small


def _has_several(layout: ParallelLayout) -> tuple[bool, ...]:
    """Returns for each kind of group whether it has several ranks."""
    shared = (layout.dp or 1) * layout.cp
    levels = layout.hierarchical_cp or (1, 1)
    sizes = (
        *(layout.tp, layout.cp, layout.pp, layout.vpp, layout.dp or 1, layout.ep),
        *(layout.expert_tp, layout.expert_dp, layout.dp_outer, shared // layout.dp_outer),
        *(levels[0], levels[1], layout.tp // math.gcd(layout.tp, layout.expert_tp)),
    )
    return tuple(size > 1 for size in sizes)
