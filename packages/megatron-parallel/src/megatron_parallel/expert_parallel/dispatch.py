"""Token dispatch: sends tokens to the ranks of their experts, and the results back.

    route = dispatcher.route(experts)                         # as soon as the experts are chosen
    ...
    dispatch = route.dispatch(tokens, weights)                # starts to send
    rows, counts, has_tail = dispatch.wait()                  # [m, h], sorted by local expert
    combine = dispatch.combine(experts_of_this_rank(rows, counts))
    y = combine.wait()                                        # [n, h], summed over experts

Each rank has tokens of its own. The experts are distributed over two axes: each rank of `ep` has
some of the experts, and `expert_tp` cuts the matrices of each expert, so that a rank computes
partial sums. Results and gradients are neither scaled nor averaged.

Between `dispatch` and its `wait`, and between `combine` and its `wait`, the messages of `alltoall`
are in flight, in the backward pass too. Other work can overlap them: a shared expert, or another
micro-batch with a `PassInterleaver`.

| dispatcher | over `ep` | over `expert_tp` | suited to |
|---|---|---|---|
| `alltoall` | sends one row per choice to its rank | gathers these rows | many experts |
| `allgather` | sends all tokens to all ranks | the same | tokens that most ranks need |

How many rows an expert has is data on the device. The host waits for the device only where a
message must have exactly that many rows:

| dispatcher | rows of a rank's experts | waits of the host |
|---|---|---|
| `alltoall` | those that it has | one, begun in `route`; none if one rank has all experts |
| `alltoall` with a bound | a bound for each pair of ranks | none |
| `allgather` | a bound for the rank | none |

The backward pass never waits. With a bound, rows that belong to no expert follow the others. They
need memory and copies but no product. In order of increasing tightness, with `n` tokens on each of
`ranks` ranks, `k` choices of each token and `e` experts on a rank:

- Every token may choose `min(k, e)` of a rank's experts. So `allgather` has `n ranks min(k, e)`
  rows, which for many ranks and few choices is up to `ep` times the mean. That many rows are
  possible, so a job that runs out of memory does so in its first step.
- With `RowLimits.per_expert` (the capacity of experts), no more than that many tokens of each
  micro-batch for each expert. `alltoall` has that bound for each pair of ranks, if it is `static`.
  All kept tokens of an expert may be on one rank, so if a micro-batch is divided over tensor- or
  context-parallel ranks, most of what is sent is empty: give a factor too.
- With `rank_capacity_factor`, that factor times the mean: `n ranks k / ep` rows for `allgather` and
  `n k / ep` for each pair of ranks for `alltoall`. More rows are an error, which `Route.overflow`
  counts and for which outputs of tokens that have rows are NaN.
"""

from collections.abc import Callable
from typing import Final

from megatron_parallel.errors import LayoutError
from megatron_parallel.expert_parallel.all_gather import AllGatherDispatcher
from megatron_parallel.expert_parallel.all_to_all import AllToAllDispatcher
from megatron_parallel.expert_parallel.protocol import Dispatcher, RowOps
from megatron_parallel.mesh.mesh import Mesh

DISPATCHERS: Final[dict[str, Callable[[Mesh, int, RowOps, float | None], Dispatcher]]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
"""Dispatchers by their names in Megatron-LM."""


def build_dispatcher(
    name: str,
    mesh: Mesh,
    num_experts: int,
    ops: RowOps,
    *,
    rank_capacity_factor: float | None = None,
) -> Dispatcher:
    """Returns a dispatcher for the experts of one layer.

    Args:
        name: Name of the dispatcher, one of `DISPATCHERS`.
        mesh: Mesh of this rank.
        num_experts: Number of experts of the layer.
        ops: Operations on rows.
        rank_capacity_factor: Largest number of rows, as a multiple of the mean over ranks of `ep`.
            Defaults to no bound but what the tokens allow.

    Raises:
        LayoutError: No dispatcher has that name, the size of axis `ep` does not divide the number
            of experts, or the factor is not positive.
    """
    ep = mesh.axis("ep")
    if num_experts % ep.size:
        raise LayoutError(
            f"{num_experts} experts cannot be cut into {ep.size} equal parts over axis 'ep': "
            f"choose a degree that divides {num_experts}"
        )
    if name not in DISPATCHERS:
        raise LayoutError(f"no dispatcher is called {name!r}: there are {', '.join(DISPATCHERS)}")
    if rank_capacity_factor is not None and not rank_capacity_factor > 0:
        raise LayoutError(
            f"rank_capacity_factor {rank_capacity_factor} leaves no rows for experts: use a factor "
            "of at least 1.0, or None for no bound"
        )
    return DISPATCHERS[name](mesh, num_experts, ops, rank_capacity_factor)
