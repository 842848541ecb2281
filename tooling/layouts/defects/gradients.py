"""Defects of gradients: which are summed, over which ranks, and how often."""

from megatron_parallel import GradientBuffers, Mesh
from megatron_parallel.data_parallel.bucket import Bucket
from megatron_train.prove.defects import bucket_left_out, norms_not_summed, tied_not_summed
from torch import Tensor

from layouts.defects.catalogue import Replace, defect

defect("the gradients of norms are not summed over tensor-parallel ranks", "tp2·sp-untied")(
    norms_not_summed
)
defect("a tied gradient is not summed over its two stages", "pp2-tied")(tied_not_summed)
defect("a bucket of gradients is not summed over data-parallel ranks", "dp2-tied-dropout")(
    bucket_left_out
)


@defect("a tied gradient is counted twice", "pp2-tied")
def _tied_summed_twice(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.reduce_extra_axes

    def wrong(self: Bucket) -> None:
        true(self)
        self.wait()
        if self.plan.tied and self.flat is not None:
            self.flat.mul_(2.0)

    replace(Bucket, "reduce_extra_axes", wrong)


@defect("gradients are averaged over data-parallel ranks", "dp2-tied-dropout")
def _averaged(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.wait

    def wrong(self: Bucket) -> None:
        true(self)
        if self.flat is not None:
            self.flat.div_(self.axes.size)

    replace(Bucket, "wait", wrong)


@defect("a product overwrites the gradient that it should add to", "dp2-tied-dropout")
def _overwritten(mesh: Mesh, replace: Replace) -> None:
    true = Bucket.accumulation_target

    def wrong(self: Bucket, name: str) -> tuple[Tensor, bool]:
        return true(self, name)[0], True

    replace(Bucket, "accumulation_target", wrong)


@defect("a bucket is summed before products have added to it", "dp2·sharded-tied-dropout")
def _summed_before_products(mesh: Mesh, replace: Replace) -> None:
    begin, arrived = GradientBuffers.begin, GradientBuffers._arrived
    target = Bucket.accumulation_target

    def begin_without(self: GradientBuffers, *, last: bool = False) -> None:
        begin(self, last=last)
        for bucket in self.buckets:
            bucket.pending -= bucket._fused

    def late_target(self: Bucket, name: str) -> tuple[Tensor, bool]:
        launched, self.launched = self.launched, False
        found = target(self, name)
        self.launched = launched
        return found

    def late_arrival(self: GradientBuffers, bucket: Bucket, name: str, parameter: Tensor) -> None:
        if not bucket.launched:
            arrived(self, bucket, name, parameter)

    replace(GradientBuffers, "begin", begin_without)
    replace(Bucket, "accumulation_target", late_target)
    replace(GradientBuffers, "_arrived", late_arrival)
