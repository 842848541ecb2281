"""Defects of gains of 1 + weight, multipliers and bounded logits."""

from typing import Any

import megatron_models.components.norm.module as norm
from megatron_kernels import rms_norm
from megatron_models.components.block import Block
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import LinearCrossEntropy
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("a norm forgets that its gain is 1 + weight", "tp2·sp·selective-scaled-dropout")
def _gain_without_one(mesh: Mesh, replace: Replace) -> None:
    replace(norm, "rms_norm", lambda x, weight, eps, zero_centered: rms_norm(x, weight, eps))


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
