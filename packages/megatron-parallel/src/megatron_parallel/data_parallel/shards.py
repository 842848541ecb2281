"""What an optimizer sees of parameters of which each data-parallel rank updates a part."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.views import View


@runtime_checkable
class ParameterShards(Protocol):
    """The parts of one stage's parameters that this rank updates.

    `ParameterBuffers` (flat parts of buckets) and `FullySharded` (boxes) are of this kind.
    """

    def local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """By global name, in the parameters' own dtype; updated in place."""

    def views(self, tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, list[View]]:
        """Views, for a checkpoint, of tensors shaped like the parts (moments, main weights).

        Those of other stages are left to them.
        """

    def start_gather(self) -> None:
        """Says that the parts were updated: other ranks may have them now."""

    def wait_for_parameters(self) -> None:
        """Returns when parameters may be read, or written to, from outside of the model."""
