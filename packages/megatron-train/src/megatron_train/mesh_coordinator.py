"""Coordination of saves and loads between the ranks of a mesh."""

from megatron_ckpt import Coordinator, DistributedCoordinator, SingleProcessCoordinator
from megatron_parallel import Mesh
from megatron_parallel.collectives import raise_collective_errors


class MeshCoordinator(DistributedCoordinator):
    """Coordinates saves and loads of all ranks of a mesh; errors name missing ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._axis = mesh.axis("world")
        super().__init__(self._axis.process_group)

    def gather(self, text: str) -> list[str] | None:
        """Returns the texts of all ranks, by rank, on rank 0; None on other ranks."""
        with raise_collective_errors(self._axis, "the agreement on a checkpoint"):
            return super().gather(text)

    def broadcast(self, text: str) -> str:
        """Returns rank 0's text on every rank."""
        with raise_collective_errors(self._axis, "the agreement on a checkpoint"):
            return super().broadcast(text)


def coordinator_of(mesh: Mesh) -> Coordinator:
    """Returns the coordinator of saves and loads of the ranks of ``mesh``."""
    return SingleProcessCoordinator() if mesh.world_size == 1 else MeshCoordinator(mesh)
