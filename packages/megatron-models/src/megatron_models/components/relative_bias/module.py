"""Learned biases of attention by relative position (Raffel et al. 2020, section 2.1)."""

import math

import torch
from jaxtyping import Float, Int
from megatron_kernels import Mask, select_rows
from torch import Tensor, nn

from megatron_models.components.relative_bias.spec import RelativeBiasSpec
from megatron_models.placement import Placement


class RelativeBias(nn.Module):
    """The biases of one trunk, for this rank's heads."""

    weight: Tensor

    def __init__(self, spec: RelativeBiasSpec, placement: Placement) -> None:
        super().__init__()
        self.bidirectional = spec.bidirectional
        self.buckets = spec.relative_attention_num_buckets // (2 if spec.bidirectional else 1)
        self.max_distance = spec.relative_attention_max_distance
        placement.register_parameters(self, {"weight": spec.sharding()})

    def forward(
        self, mask: Mask, queries: int, keys: int, query_offset: int
    ) -> Float[Tensor, "b_or_1 n s t"]:
        """Returns the biases of attention scores, `megatron_kernels.Scores.bias`.

        Args:
            mask: Mask of the attention, which has the positions.
            queries: Number of queries.
            keys: Number of keys.
            query_offset: Index of the first query among the keys.
        """
        device = self.weight.device
        relative = mask.relative_positions(queries, keys, query_offset, device=device)
        distance = relative.abs() if self.bidirectional else (-relative).clamp(min=0)
        table = distance_buckets(self.buckets, self.max_distance, device)
        index = table[distance.clamp(max=self.max_distance).long()]
        if self.bidirectional:
            index = index + self.buckets * (relative > 0)
        return select_rows(self.weight, index).permute(0, 3, 1, 2).contiguous()


def distance_buckets(
    buckets: int, max_distance: int, device: torch.device | None = None
) -> Int[Tensor, " distances"]:
    """Returns the buckets of the distances from 0 to ``max_distance``.

    Half of the buckets hold one distance each. The others hold ranges that grow exponentially, up
    to the maximum. Computed in float32 like in T5's own code, whose rounding decides the bucket of
    some distances.

    Args:
        buckets: Number of buckets of one direction.
        max_distance: Distance from which on all have the last bucket.
        device: Device of the result.
    """
    exact = buckets // 2
    distance = torch.arange(max_distance + 1, device=device)
    ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).clamp(min=0).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
