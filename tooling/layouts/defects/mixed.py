"""Defects of layers that differ one by one."""

from collections.abc import Callable
from typing import Any

from megatron_models.components.attention.module import Attention
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import ReplicatedSpec

from layouts.defects.catalogue import Replace, defect


@defect(
    "linear layers in place of sublayers have gradients of a rank's tokens", "tp2·sp-mixed-dropout"
)
def _linear_layers_not_summed(mesh: Mesh, replace: Replace) -> None:
    true = ReplicatedSpec.shardings
    replace(ReplicatedSpec, "shardings", lambda self, sequence_parallel=False: true(self))


@defect("the heads of every layer are numbered as if it had all", "tp2·sp-mixed-dropout")
def _heads_of_the_model(mesh: Mesh, replace: Replace) -> None:
    true: Callable[..., None] = Attention.__init__

    def numbered(self: Attention, *arguments: Any) -> None:
        true(self, *arguments)
        self.first_head = 8 // mesh.axis("tp").size * mesh.axis("tp").index

    replace(Attention, "__init__", numbered)
