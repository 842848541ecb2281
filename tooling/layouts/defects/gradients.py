"""Defects of gradients: what is summed, over which ranks, and how often."""

from typing import Any

import megatron_parallel.collectives as collectives
import megatron_parallel.tensor_parallel.layers as layers
from megatron_parallel import Mesh
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_parallel.tensor_parallel import RowParallelLinear
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("the gradients of norms are not summed over tensor-parallel ranks", "tp2·sp-untied")
def _norms_not_summed(mesh: Mesh, replace: Replace) -> None:
    _without_further_sum(replace, "tp")


@defect("a tied gradient is not summed over its two stages", "pp2-tied")
def _tied_not_summed(mesh: Mesh, replace: Replace) -> None:
    _without_further_sum(replace, "embedding")


def _without_further_sum(replace: Replace, axis: str) -> None:
    true = Bucket.sum_further

    def wrong(self: Bucket) -> None:
        self.further = tuple(other for other in self.further if other.name != axis)
        true(self)

    replace(Bucket, "sum_further", wrong)


@defect("a tied gradient is counted twice", "pp2-tied")
def _tied_summed_twice(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.sum_further

    def wrong(self: Bucket) -> None:
        true(self)
        if self.plan.tied and self.flat is not None:
            self.flat.mul_(2.0)

    replace(Bucket, "sum_further", wrong)


@defect("a bucket of gradients is not summed over data-parallel ranks", "dp2-tied-dropout")
def _bucket_left_out(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.launch

    def wrong(self: Bucket) -> None:
        if self.label.startswith("1 of"):
            self.launched = True
        else:
            true(self)

    replace(Bucket, "launch", wrong)


@defect("gradients are averaged over data-parallel ranks", "dp2-tied-dropout")
def _averaged(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.wait

    def wrong(self: Bucket) -> None:
        true(self)
        if self.flat is not None:
            self.flat.div_(self.route.size)

    replace(Bucket, "wait", wrong)


@defect("an input's gradient is not summed over tensor-parallel ranks", "tp2-tied")
def _copy_without_sum(mesh: Mesh, replace: Replace) -> None:
    replace(layers, "copy_to_axis", lambda x, axis: x)


@defect("a gathered sequence's gradient is cut without being summed", "tp2·sp-untied")
def _gather_without_sum(mesh: Mesh, replace: Replace) -> None:
    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return collectives._own_part(grads[0], ctx.axis, 0), None

    replace(collectives._GatherSequence, "backward", staticmethod(wrong))


@defect("a row-parallel bias is added by every rank", "tp2-tied")
def _bias_on_every_rank(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: RowParallelLinear, x: Tensor) -> Tensor:
        partial = layers.functional.linear(x, self.weight, self.bias)
        return layers.reduce_from_axis(partial, self.axis)

    replace(RowParallelLinear, "forward", wrong)
