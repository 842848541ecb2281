"""The part of a rank's tensor that the rank updates, if data-parallel ranks share it."""

from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor

from megatron_parallel.mesh.axes import Axis
from megatron_parallel.sharding.sharding import Box


@dataclass(frozen=True)
class Region:
    """Boxes of a rank's tensor, whose elements follow one another in a shard.

    Attributes:
        axis: The axis of the ranks that share the tensor; None if each of them updates all of it.
        boxes: The boxes of this rank in its tensor, without empty ones.
    """

    axis: Axis | None
    boxes: tuple[Box, ...]

    def pieces(self, shard: Shaped[Tensor, "..."]) -> list[tuple[Shaped[Tensor, "..."], Box]]:
        """Returns views of a shard, one for each box, with their boxes."""
        if len(self.boxes) == 1 and tuple(shard.shape) == self.boxes[0].lengths:
            return [(shard, self.boxes[0])]
        flat, found, start = shard.view(-1), [], 0
        for box in self.boxes:
            found.append((flat[start : start + box.numel].view(box.lengths), box))
            start += box.numel
        return found
