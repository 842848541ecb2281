"""All-gather attention: each rank gathers the keys and values of all ranks for its own queries.

Supports any mask and any number of heads. The keys and values of the whole sequence must fit into
memory (Llama Team, The Llama 3 Herd of Models, section 3.3.2).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_parallel.collectives.operations import gather_sequence
from megatron_parallel.context_parallel.heads import Attend
from megatron_parallel.context_parallel.split import ContextSplit
from megatron_parallel.mesh.axes import Axis


def all_gather_attention(
    q: Float[Tensor, "part b n d"],
    k: Float[Tensor, "part b g d"],
    v: Float[Tensor, "part b g dv"],
    split: ContextSplit,
    axis: Axis,
    attend: Attend,
) -> Float[Tensor, "part b n dv"]:
    """Returns attention of this rank's queries over the keys of all ranks of the axis.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        split: Split of the sequence over the ranks.
        axis: Context-parallel axis.
        attend: Attention of these queries over all keys and values, in the order of the sequence.
    """
    sizes = [k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]]
    packed = gather_sequence(torch.cat([k.flatten(2), v.flatten(2)], -1), axis)
    keys, values = (
        torch.unflatten(part, -1, (k.shape[2], -1))
        for part in torch.split(split.to_sequence_order(packed), sizes, -1)
    )
    return attend(q, keys, values)
