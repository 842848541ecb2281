"""Fully sharded data parallelism on ranks whose other ranks do not exist."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron_parallel import ParallelLayout, Sharding
from megatron_parallel.data_parallel.fully_sharded import FullySharded
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.sharding import Box
from megatron_parallel.sharding.cut import Cut
from torch import nn

from .test_data_parallel_fully_sharded import with_groups


def test_only_stages_that_hold_a_tied_weight_sum_it() -> None:
    for rank, tied in ((0, ["embedding"]), (1, []), (2, ["embedding"])):
        sharded = object.__new__(FullySharded)  # without process groups
        sharded._mesh = with_groups(ParallelLayout(pp=3, dp=1), rank)[0]
        sharded._parameters = dict.fromkeys(("embedding", "own"))  # type: ignore[arg-type]
        sharded._table = {
            "embedding": Sharding((4,), tied="embedding"),
            "own": Sharding((4,)),
        }
        assert sharded.tied == tied


def test_what_one_rank_holds_whole_is_not_cut() -> None:
    sharded = object.__new__(FullySharded)
    sharded._parameters = {name: nn.Parameter(torch.ones(4)) for name in ("own", "cut", "frozen")}
    sharded._parameters["frozen"].requires_grad_(False)
    box = (Box((0,), (4,)),)
    sharded._cuts = {
        name: Cut(Axis("dp", tuple(range(size)), 0, None, size), (4,), box * size)
        for name, size in (("own", 1), ("cut", 2), ("frozen", 2))
    }
    assert list(sharded.cuts()) == ["cut"]


def test_passes_are_announced_and_what_an_evaluation_left_gathered_is_dropped() -> None:
    calls: list[Any] = []
    sharded = object.__new__(FullySharded)
    sharded._parameters, sharded._finished = {}, False
    sharded._sharded = SimpleNamespace(  # type: ignore[assignment]
        set_gradient_sync=lambda last: calls.append(("sync", last)),
        reshard=lambda: calls.append("reshard"),
    )
    sharded._unsharded = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda *, last: calls.append(("begin", last))
    )
    sharded.begin()
    sharded.begin(last=True)
    assert sharded.all_local_shards() == {}
    assert calls == [
        *(("sync", False), ("begin", False), ("sync", True), ("begin", True)),
        "reshard",
    ]
