"""Defects of update rules that need matrices or sums."""

from collections.abc import Sequence
from typing import Any

from megatron_optim.matrices import Matrices
from megatron_optim.sums import Sums
from megatron_parallel import Mesh
from torch import Tensor

from layouts.defects.catalogue import Replace, defect


@defect(
    "Muon orthogonalizes the shards of tensor-parallel ranks",
    "tp2·sp·dp2·sharded·ep2·etp1·muon-moe-gated",
)
def _blockwise(mesh: Mesh, replace: Replace) -> None:
    true = Matrices.map_local

    def wrong(self: Matrices, shards: Sequence[Tensor], function: Any, **options: Any) -> Any:
        return true(self, shards, function, **{**options, "tensor_parallel": "blockwise"})

    replace(Matrices, "map_local", wrong)


@defect(
    "Adafactor sums the rows and columns of its own shards", "tp2·sp·dp2·sharded·adafactor-untied"
)
def _own_sums(mesh: Mesh, replace: Replace) -> None:
    replace(Sums, "_reduce", lambda *_: None)
