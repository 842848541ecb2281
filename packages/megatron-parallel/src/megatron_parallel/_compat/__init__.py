"""All uses of private or changing parts of torch.

- `autograd`: queries of the autograd engine, saved-tensor hooks, weak references to storages.
- `collectives`: torch's collectives, under the names of each version of torch.
- `compiler`: what torch.compile can generate code for, and what it takes as a constant.
- `fully_sharded`: torch's `fully_shard` with our collectives.
- `groups`: the key-value store of the job, process groups and aborting them.
- `pipelining`: torch's pipeline schedules. Import it explicitly: importing torch's pipelining takes
  seconds.
"""

from megatron_parallel._compat.autograd import (
    active_saved_tensors_hooks,
    force_eager,
    gradient_returned,
    gradient_wanted,
    storage_identity,
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
from megatron_parallel._compat.compiler import (
    constant_to_compiler,
    outside_graphs,
    why_not_compiled,
)
from megatron_parallel._compat.fully_sharded import (
    ShardedModule,
    ShardRanks,
    fully_shard,
    local_shard,
)
from megatron_parallel._compat.groups import (
    Store,
    abort_groups,
    default_store,
    new_groups,
    tcp_store,
)

__all__ = [
    "ShardRanks",
    "ShardedModule",
    "Store",
    "abort_groups",
    "active_saved_tensors_hooks",
    "all_gather",
    "constant_to_compiler",
    "default_store",
    "force_eager",
    "fully_shard",
    "gradient_returned",
    "gradient_wanted",
    "local_shard",
    "new_groups",
    "outside_graphs",
    "reduce_scatter",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
    "storage_identity",
    "tcp_store",
    "weak_storage_ref",
    "why_not_compiled",
]
