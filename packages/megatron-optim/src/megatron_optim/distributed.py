"""Optimizer state cut over data-parallel ranks: ZeRO (Rajbhandari et al. 2020).

Each rank updates its part of the parameters, a flat shard of every bucket
(`megatron_parallel.ParameterBuffers`, ZeRO-1) or a box of every parameter (`FullySharded`, ZeRO-3),
and has optimizer state, and main parameters of bf16 weights, for that alone: with `d` ranks, a
`d`-th of the memory. AdamW goes element by element, so cutting anywhere changes nothing; what does
depend on the parameter as a whole (weight decay, its count in the norm) follows from the sharding
table, by name. A checkpoint holds the same global tensors as without: a flat part is handed over as
the boxes it covers, and any layout may load it.
"""

from collections.abc import Mapping

from megatron_parallel import View
from torch import Tensor

from megatron_optim.mixed_precision import MainParameters


class ShardedMainParameters(MainParameters):
    """The parts that this rank updates; `copy_main_to_model` gives every rank all of them."""

    sharded = True

    def copy_main_to_model(self) -> None:
        """Round the fp32 copies into the parameters, then start gathering those of other ranks."""
        super().copy_main_to_model()
        for shard in self._trainable.shards:
            shard.start_gather()

    def copy_model_to_main(self) -> None:
        """Takes the fp32 copies anew from the model's parameters, after weights were loaded."""
        for shard in self._trainable.shards:
            shard.wait_for_parameters()
        super().copy_model_to_main()

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, list[View]]:
        """Returns views of tensors shaped like the parts, for a checkpoint."""
        shards, mesh = self._trainable.shards, self._trainable.mesh
        return {name: v for each in shards for name, v in each.views(tensors, mesh).items()}

    def _local_parameters(self) -> dict[str, Tensor]:
        """Returns the parts that this rank updates, by name."""
        return {
            n: part for each in self._trainable.shards for n, part in each.local_shards().items()
        }
