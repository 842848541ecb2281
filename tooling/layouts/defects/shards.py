"""Defects of sharded weights and gradients: the distributed optimizer and full sharding."""

from megatron_parallel import Mesh
from megatron_parallel.data_parallel import fully_sharded
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.data_parallel.fully_sharded import FullySharded
from megatron_parallel.data_parallel.parameters import ParameterBuffers
from megatron_parallel.data_parallel.plan import BucketPlan, SlotRange
from megatron_parallel.data_parallel.reduction import ReductionAxes
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("weights are read before they are gathered", "dp2·gathered-untied")
def _read_before_gathered(mesh: Mesh, replace: Replace) -> None:
    true = ParameterBuffers.wait_for_parameters

    def late(self: ParameterBuffers) -> None:
        if vars(self).pop("put_off", False):
            gather(self)
        true(self)

    gather = ParameterBuffers.start_gather
    replace(ParameterBuffers, "start_gather", lambda self: vars(self).update(put_off=True))
    replace(ParameterBuffers, "wait_for_parameters", late)


@defect("every shard begins one element late", "dp2·sharded-tied-dropout")
def _shard_off_by_one(mesh: Mesh, replace: Replace) -> None:
    true = BucketPlan.shard_ranges

    def wrong(self: BucketPlan, index: int) -> tuple[SlotRange, ...]:
        first, *rest = true(self, index)
        return (first._replace(start=first.start + 1, offset=first.offset + 1), *rest)

    replace(BucketPlan, "shard_ranges", wrong)


@defect("every shard holds the elements one index later", "tp2·sp·dp4·sharded-untied")
def _shard_shifted(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.gradients

    def wrong(self: Bucket) -> dict[str, Tensor]:
        return {name: gradient.roll(1) for name, gradient in true(self).items()}

    replace(Bucket, "gradients", wrong)


@defect("fully sharded gradients are averaged over micro-batches", "dp2·fsdp-tied-dropout")
def _accumulation_averaged(mesh: Mesh, replace: Replace) -> None:
    def every_time(self: FullySharded, *, last: bool = False) -> None:
        vars(self)["count"] = 0 if last else vars(self).get("count", 0) + 1
        vars(self)["divide_by"] = max(vars(self).get("divide_by", 1), vars(self)["count"] + 1)
        self._sharded.set_gradient_sync(True)

    true = FullySharded.sum_partial

    def sum_partial(self: FullySharded) -> None:
        true(self)
        for gradient in self.gradients().values():
            gradient.div_(vars(self)["divide_by"])

    replace(FullySharded, "begin", every_time)
    replace(FullySharded, "sum_partial", sum_partial)


@defect("fully sharded gradients are summed after the first micro-batch", "dp4·fsdp-untied")
def _accumulation_cut_short(mesh: Mesh, replace: Replace) -> None:
    def first(self: FullySharded, *, last: bool = False) -> None:
        self._sharded.set_gradient_sync(not last)

    replace(FullySharded, "begin", first)


@defect(
    "fully sharded experts are shared by all data-parallel ranks", "dp4·fsdp·ep2·a2a-moe-dropout"
)
def _experts_over_all(mesh: Mesh, replace: Replace) -> None:
    replace(fully_sharded, "ReductionAxes", lambda _: ReductionAxes(mesh.axis("dp")))
