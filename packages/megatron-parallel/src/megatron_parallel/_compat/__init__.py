"""Every contact with private or fast-moving parts of torch, in one place.

`_compat.pipelining` is imported by itself: it imports torch's pipelining, which takes seconds.
"""

from megatron_parallel._compat.autograd import (
    active_saved_tensors_hooks,
    force_eager,
    gradient_returned,
    gradient_wanted,
    resolve_weak_storage,
    weak_storage_ref,
)
from megatron_parallel._compat.collectives import (
    all_gather,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from megatron_parallel._compat.fully_sharded import ShardedModule, fully_shard, local_part
from megatron_parallel._compat.groups import (
    Store,
    abort_groups,
    default_store,
    new_groups,
    tcp_store,
)

__all__ = [
    "ShardedModule",
    "Store",
    "abort_groups",
    "active_saved_tensors_hooks",
    "all_gather",
    "default_store",
    "force_eager",
    "fully_shard",
    "gradient_returned",
    "gradient_wanted",
    "local_part",
    "new_groups",
    "reduce_scatter",
    "resolve_weak_storage",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "tcp_store",
    "weak_storage_ref",
]
