"""Self-attention with query groups: fused projection, rotation, attention, projection back."""

import torch
from jaxtyping import Float
from megatron_kernels import Mask, attention, rope
from megatron_parallel import Init, Mesh
from megatron_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_models.cache import KVCache
from megatron_models.config import GPTConfig
from megatron_models.layers.rope import Angles


class Attention(nn.Module):
    """Self-attention of one layer; the tensor-parallel axis cuts it by query groups.

    The rows of the fused weight ``(g, (n/g + 2) * d, h)`` are, for every group, those of its query
    heads, then its key, then its value.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.interleaved = config.rotary_interleaved
        self.head_size = config.kv_channels
        # Slots of one group in the fused projection: its query heads, its key, its value.
        self.slots = (config.heads_per_group, 1, 1)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (config.num_query_groups, sum(self.slots) * config.kv_channels),
            mesh,
            bias=config.has_qkv_bias,
            init=Init(scale=config.init_method_std),
            dtype=dtype,
            device=device,
        )
        self.out = RowParallelLinear(
            config.query_size,
            config.hidden_size,
            mesh,
            bias=config.add_bias_linear,
            init=Init(scale=config.output_std),
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        x: Float[Tensor, "s b h"],
        mask: Mask,
        angles: Angles | None,
        cache: KVCache | None,
        offset: int,
    ) -> Float[Tensor, "s b h"]:
        """Let every token attend as ``mask`` allows, in the cache too.

        Args:
            x: activations.
            mask: who may attend to whom.
            angles: cosines and sines of the rotary positions, if positions are rotary.
            cache: where keys and values are kept, when decoding.
            offset: positions in the cache before these tokens.
        """
        q, k, v = self._project(x)
        if angles is not None:
            q = rope(q, *angles, self.interleaved)
            k = rope(k, *angles, self.interleaved)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = attention(q, k, v, mask, None, offset)
        result: Tensor = self.out(y.flatten(2))
        return result

    def _project(
        self, x: Float[Tensor, "s b h"]
    ) -> tuple[Float[Tensor, "s b n d"], Float[Tensor, "s b g d"], Float[Tensor, "s b g d"]]:
        fused = self.qkv(x).unflatten(-1, (-1, self.head_size))
        q, k, v = fused.split(self.slots, dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
