"""Defects of gains of 1 + weight, norms of heads, multipliers and bounded logits."""

from dataclasses import replace as replaced
from typing import Any

import megatron_models.components.norm.module as norm
from megatron_kernels import rms_norm
from megatron_models.components.attention import qk_norm
from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_models.components.block import Block
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import LinearCrossEntropy
from torch import Tensor

from layouts.defects.catalogue import Replace, defect, replace_operation


@defect("a norm forgets that its gain is 1 + weight", "tp2·sp·selective-scaled-dropout")
def _gain_without_one(mesh: Mesh, replace: Replace) -> None:
    replace_operation(
        replace, norm, "rms_norm", lambda x, weight, eps, zero_centered: rms_norm(x, weight, eps)
    )


@defect("the mean square of a projection is that of the rank's heads", "tp4-few-dropout")
def _square_of_own_heads(mesh: Mesh, replace: Replace) -> None:
    replace(qk_norm, "all_reduce", lambda x, axis: x * axis.size)


@defect("the backward pass of a projection's norm sums own heads", "tp4-few-dropout")
def _backward_of_own_heads(mesh: Mesh, replace: Replace) -> None:
    true = qk_norm._RMSNormOverRanks.backward

    def wrong(ctx: Any, *grads: Tensor) -> Any:
        ctx.axis = Mesh.single().axis("tp")
        return true(ctx, *grads)

    replace(qk_norm._RMSNormOverRanks, "backward", staticmethod(wrong))


@defect("gains of heads have the gradient of a rank's heads", "tp2·pp2·few-logits-scaled")
def _gain_of_own_heads(mesh: Mesh, replace: Replace) -> None:
    true = QKNormSpec.shardings

    def wrong(self: QKNormSpec, sequence_parallel: bool = False) -> Any:
        cuts = true(self, sequence_parallel).items()
        return {name: replaced(cut, partial=None) for name, cut in cuts}

    replace(QKNormSpec, "shardings", wrong)


@defect("the residual multiplier is applied twice", "tp2·sp·selective-scaled-dropout")
def _multiplier_twice(mesh: Mesh, replace: Replace) -> None:
    true = Block._output

    def wrong(self: Block, sublayer: Any, context: Any, y: Tensor) -> Tensor:
        return true(self, sublayer, context, y) * sublayer.multiplier

    replace(Block, "_output", wrong)


@defect("the fused loss does not bound the logits", "tp2·pp2·few-logits-scaled")
def _fused_without_bound(mesh: Mesh, replace: Replace) -> None:
    true = LinearCrossEntropy.__call__

    def wrong(self: LinearCrossEntropy, *inputs: Any, **options: Any) -> Tensor:
        return true(self, *inputs, **{**options, "softcap": 0.0})

    replace(LinearCrossEntropy, "__call__", wrong)
