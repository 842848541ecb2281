"""The order of interleaved 1F1B in groups of micro-batches equals megatron-core's tables."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_parallel import LayoutError
from megatron_parallel.pipeline import Action, check_micro_batches, planned_actions

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")


def theirs(pp: int, rank: int, count: int, vpp: int, group_size: int) -> list[Action]:
    """Returns the passes of megatron-core's loop: warm-up forward passes, pairs, then the rest."""
    table = schedules.get_schedule_table(count, vpp, group_size)
    place: Any = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=vpp,
    )
    total, _, ahead, _ = schedules.get_pp_rank_microbatches(
        count, vpp, group_size, p2p_communicator=place
    )
    assert total == len(table) == count * vpp
    forward = [Action("F", chunk * pp + rank, number) for number, chunk in table]
    backward = [Action("B", (vpp - 1 - chunk) * pp + rank, number) for number, chunk in table]
    plan = forward[:ahead]
    for done in range(total - ahead):
        plan += [forward[ahead + done], backward[done]]
    return plan + backward[total - ahead :]


def test_plans_of_groups_are_megatrons() -> None:
    compared = 0
    for pp, vpp, count in product((2, 3, 4), (2, 3), range(2, 15)):
        for group_size in range(pp, count + 1):
            try:
                check_micro_batches("interleaved-1f1b", pp, vpp, count, group_size)
            except LayoutError:
                assert 0 < count % group_size < pp  # megatron-core refuses these as well
                continue
            for rank in range(pp):
                ours = planned_actions("interleaved-1f1b", pp, rank, count, vpp, group_size)
                assert ours == theirs(pp, rank, count, vpp, group_size)
                compared += 1
    assert compared > 500
