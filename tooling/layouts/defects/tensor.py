"""Defects of tensor-parallel layers: sums, gathers, query groups, smoothing."""

from typing import Any, NamedTuple

import megatron_parallel.collectives.operations as collectives
import megatron_parallel.tensor_parallel.cross_entropy as cross_entropy
import megatron_parallel.tensor_parallel.layers as layers
import megatron_parallel.tensor_parallel.linear as linear
import megatron_parallel.tensor_parallel.sliced_linear as sliced_linear
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import RowParallelLinear
from torch import Tensor
from torch.nn import functional

from layouts.defects.catalogue import Replace, defect


class _Done(NamedTuple):
    """What is waited for, and there."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


@defect("an input's gradient is not summed over tensor-parallel ranks", "tp2-tied")
def _copy_without_sum(mesh: Mesh, replace: Replace) -> None:
    replace(linear, "start_all_reduce", lambda x, axis: _Done(x))


@defect("a gathered sequence's gradient is cut without being summed", "tp2·sp-untied")
def _gather_without_sum(mesh: Mesh, replace: Replace) -> None:
    def wrong(whole: Tensor, axis: Any) -> _Done:
        return _Done(collectives._own_part(whole, axis, 0))

    replace(linear, "start_reduce_scatter", wrong)


@defect("an input is gathered again in another order", "tp2·sp-untied")
def _gathered_again_in_another_order(mesh: Mesh, replace: Replace) -> None:
    true = linear.start_all_gather

    def wrong(part: Tensor, axis: Any) -> _Done:
        whole = true(part, axis).wait()
        return _Done(whole.unflatten(0, (axis.size, -1)).flip(0).flatten(0, 1))

    replace(linear, "start_all_gather", wrong)


@defect("slices of a sum are concatenated in another order", "tp2·sp·slices-untied-dropout")
def _slices_in_another_order(mesh: Mesh, replace: Replace) -> None:
    true = sliced_linear.concatenate
    replace(sliced_linear, "concatenate", lambda slices: true(slices[::-1]))


@defect("a row-parallel bias is added by every rank", "tp2-tied")
def _bias_on_every_rank(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: RowParallelLinear, x: Tensor, **options: bool | None) -> Tensor:
        partial = functional.linear(x, self.weight, self.bias)
        return layers.reduce_from_axis(partial, self.axis)

    replace(RowParallelLinear, "forward", wrong)


@defect("ranks that share a query group attend with the same heads", "tp4-few-dropout")
def _same_heads_of_a_group(mesh: Mesh, replace: Replace) -> None:
    true = Tensor.chunk

    def wrong(self: Tensor, chunks: int, dim: int = 0) -> Any:
        found = true(self, chunks, dim)
        return (found[0],) * chunks if self.dim() == 5 else found

    replace(Tensor, "chunk", wrong)


@defect("gradients of keys and values are not summed over the ranks of a group", "tp4-few-dropout")
def _kv_not_summed(mesh: Mesh, replace: Replace) -> None:
    def wrong(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return collectives._own_part(grads[0], ctx.axis, 0), None

    replace(collectives._GatherSequence, "backward", staticmethod(wrong))


@defect("label smoothing counts a rank's own slice of the vocabulary", "tp2·smooth-untied")
def _local_vocabulary(mesh: Mesh, replace: Replace) -> None:
    ranks = mesh.axis("tp").size
    replace(cross_entropy, "_share", lambda share, vocabulary: share / (vocabulary // ranks))
