"""The optimizer's view of parameters that are sharded over data-parallel ranks."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.sharding.cut import Cut
from megatron_parallel.sharding.region import Region
from megatron_parallel.sharding.views import View


@runtime_checkable
class ParameterShards(Protocol):
    """The shards of one model chunk's parameters that this rank updates.

    `ParameterBuffers` (flat ranges of buckets) and `FullySharded` (boxes) implement this protocol.
    """

    def local_shards(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Returns the shards by global name, in the parameters' own dtype; update them in place."""

    def cuts(self) -> Mapping[str, Cut]:
        """Returns how the parameters that are cut into boxes lie on data-parallel ranks, by name.

        It includes those of which this rank has an empty box, and leaves out flat ranges, whole
        parameters and those without a gradient.
        """

    def regions(self) -> Mapping[str, Region]:
        """Returns which part of each parameter with a gradient this rank updates, by name.

        It includes parameters of which this rank updates nothing.
        """

    def views(self, tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, list[View]]:
        """Returns views, for a checkpoint, of tensors with the shapes of the shards.

        Such tensors are moments or main weights. Tensors of other model chunks are ignored.
        """

    def start_gather(self) -> None:
        """Lets other ranks gather the shards, which have been updated."""

    def wait_for_parameters(self) -> None:
        """Returns when code outside of the model may read or write parameters."""
