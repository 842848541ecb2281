"""Every contact with private or fast-moving parts of torch, in one place.

`_compat.pipelining` is imported by itself: it imports torch's pipelining, which takes seconds.
"""

from megatron_parallel._compat.autograd import (
    gradient_returned,
    gradient_wanted,
    living_storage,
    no_compiled_code,
    saved_tensors_hooks_in_force,
    weak_storage,
)
from megatron_parallel._compat.collectives import (
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from megatron_parallel._compat.fully_sharded import ShardedStage, fully_shard, local_part
from megatron_parallel._compat.groups import (
    Store,
    abort_groups,
    default_store,
    new_groups,
    tcp_store,
)

__all__ = [
    "ShardedStage",
    "Store",
    "abort_groups",
    "all_gather",
    "default_store",
    "fully_shard",
    "gradient_returned",
    "gradient_wanted",
    "living_storage",
    "local_part",
    "new_groups",
    "no_compiled_code",
    "reduce_scatter",
    "saved_tensors_hooks_in_force",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "tcp_store",
    "weak_storage",
]
