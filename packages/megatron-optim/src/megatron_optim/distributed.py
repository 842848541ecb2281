"""Optimizer state sharded over data-parallel ranks: ZeRO (Rajbhandari et al. 2020).

Each rank updates its shard of the parameters: a flat shard of every bucket
(`megatron_parallel.ParameterBuffers`, ZeRO-1) or a box of every parameter (`FullySharded`, ZeRO-3).
It has optimizer state, and main parameters of bf16 weights, for this shard alone; with `d` ranks
that is a `d`-th of the memory. AdamW works element by element, so a parameter may be split
anywhere. What depends on the whole parameter (weight decay, its part in the norm) follows from the
sharding table, by name. A checkpoint has the same global tensors as without sharding: a flat shard
is saved as the boxes that it covers, and any layout can load it.
"""

from collections.abc import Collection, Mapping

from megatron_parallel import View
from torch import Tensor

from megatron_optim.mixed_precision import MainParameters


class ShardedMainParameters(MainParameters):
    """The main parameters of the shards that this rank updates."""

    sharded = True

    def copy_main_to_model(self, done: Collection[str] = ()) -> None:
        """Rounds the fp32 copies into the parameters and starts gathering those of other ranks.

        Args:
            done: The names of those that are rounded already. Defaults to none.
        """
        super().copy_main_to_model(done)
        self.publish()

    def copy_model_to_main(self) -> None:
        """Copies the model's parameters to the fp32 copies, after weights were loaded."""
        self.wait()
        super().copy_model_to_main()

    def wait(self) -> None:
        """Returns when parameters may be read and written."""
        for shard in self._trainable.shards:
            shard.wait_for_parameters()

    def publish(self) -> None:
        """Starts gathering the shards of all ranks."""
        for shard in self._trainable.shards:
            shard.start_gather()

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, list[View]]:
        """Returns views of tensors shaped like the shards, for a checkpoint."""
        shards, mesh = self._trainable.shards, self._trainable.mesh
        return {name: v for each in shards for name, v in each.views(tensors, mesh).items()}

    def _local_parameters(self) -> dict[str, Tensor]:
        """Returns the shards that this rank updates, by name."""
        return {
            n: part for each in self._trainable.shards for n, part in each.local_shards().items()
        }
