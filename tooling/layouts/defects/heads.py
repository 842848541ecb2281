"""Defects of what attention computes from positions and for each head."""

from dataclasses import replace as replaced
from itertools import cycle
from typing import Any

import torch
from megatron_kernels import Mask
from megatron_models.components.attention import module
from megatron_models.components.context import Context
from megatron_parallel import Mesh
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect("distances of linear biases are between indices of slices", "cp2-gated-dropout")
def _local_distances(mesh: Mesh, replace: Replace) -> None:
    true = Mask.distance

    def wrong(self: Mask, *args: Any, **options: Any) -> Tensor:
        return true(replaced(self, positions=None, query_positions=None), *args, **options)

    replace(Mask, "distance", wrong)


@defect("every tensor-parallel rank has the slopes of the first heads", "tp2·sp-gated-dropout")
def _slopes_of_first_heads(mesh: Mesh, replace: Replace) -> None:
    true = module.alibi_slopes

    def wrong(heads: int, first: int, count: int, **options: Any) -> Tensor:
        return true(heads, 0, count, **options)

    replace(module, "alibi_slopes", wrong)


@defect("heads have the gates of the other group", "cp2-gated-dropout")
def _gates_of_other_group(mesh: Mesh, replace: Replace) -> None:
    true = module.gated

    def wrong(y: Tensor, gate: Tensor) -> Tensor:
        return true(y, gate.roll(1, dims=2))

    replace(module, "gated", wrong)


@defect("ranks that share a group have the gates of its first heads", "tp4·selective-gated")
def _gates_of_first_heads(mesh: Mesh, replace: Replace) -> None:
    true, is_gate = Tensor.chunk, cycle((False, True))

    def wrong(self: Tensor, chunks: int, dim: int = 0) -> Any:
        found = true(self, chunks, dim)
        return (found[0],) * chunks if self.dim() == 5 and next(is_gate) else found

    replace(Tensor, "chunk", wrong)


@defect("factors of queries count from a rank's first token", "cp2-unrotated-dropout")
def _local_temperatures(mesh: Mesh, replace: Replace) -> None:
    def wrong(self: Context, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)[:, None]

    replace(Context, "token_positions", wrong)
