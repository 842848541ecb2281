"""Defects of the gradient norm that clipping uses."""

from typing import Any

import megatron_optim.clip as clip
import megatron_parallel.sharding.sharding as sharding
from megatron_parallel import Mesh, Sharding, all_reduce
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("the norm leaves out the tensor-parallel axis", "tp2-tied")
def _norm_without_tp(mesh: Mesh, replace: Replace) -> None:
    _norm_over(replace, "pp")


@defect("the norm leaves out the pipeline axis", "pp4-tied-dropout")
def _norm_without_pp(mesh: Mesh, replace: Replace) -> None:
    _norm_over(replace, "tp_dp_cp")


def _norm_over(replace: Replace, axis: str) -> None:
    def wrong(value: Tensor, mesh: Mesh, op: Any) -> Tensor:
        return all_reduce(value, mesh.axis(axis), op=op)

    replace(clip, "_over_all_ranks", wrong)


@defect("the norm counts replicated parameters on every rank", "tp2-tied")
def _norm_counts_replicas(mesh: Mesh, replace: Replace) -> None:
    replace(Sharding, "replica", lambda self, mesh, sharded=False: 0)


@defect("the norm counts a tied weight on both stages", "tp2·pp2-tied")
def _norm_counts_twins(mesh: Mesh, replace: Replace) -> None:
    true = Sharding.replica

    def wrong(self: Sharding, mesh: Mesh, sharded: bool = False) -> int:
        return 0 if self.tied else true(self, mesh, sharded=sharded)

    replace(Sharding, "replica", wrong)


@defect("the norm counts replicated parameters of shards twice", "tp2·sp·dp4·sharded-untied")
def _norm_counts_shards_twice(mesh: Mesh, replace: Replace) -> None:
    replace(Sharding, "replica", lambda self, mesh, sharded=False: 0)


@defect("the norm counts the copies of a shard in all instances", "dp4(2x2)·fsdp-tied")
def _norm_counts_instances(mesh: Mesh, replace: Replace) -> None:
    axes = dict.fromkeys([("tp", False), (None, False)], sharding._ReplicaAxes((), ()))
    replace(sharding, "_REPLICA_AXES", axes)
