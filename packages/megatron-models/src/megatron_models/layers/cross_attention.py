"""Attention of a decoder to the encoder's output: two projections, attention, projection back."""

from functools import partial

import torch
from jaxtyping import Float
from megatron_kernels import Mask, attention
from megatron_parallel import Init, Mesh
from megatron_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_models.config import GPTConfig
from megatron_models.layers.attention import group_sharers, own_group
from megatron_models.layers.context import Context
from megatron_models.layers.dropout import CROSS_ATTENTION_PROBABILITIES


class CrossAttention(nn.Module):
    """Cross-attention of one layer; the tensor-parallel axis cuts it by query groups.

    Queries come from the decoder's stream, keys and values from the encoder's output. Neither is
    rotated: places of two texts have no distance. Where there are more ranks than groups, ranks
    share a group as in `Attention`.

    The rows of the queries' weight ``(n, d, h)`` are those of each head. Those of the fused weight
    ``(g, 2 * d, h)`` are, for every group, its key, then its value.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.tp = mesh.axis("tp")
        self.first_head = config.num_attention_heads // self.tp.size * self.tp.index
        self.head_size = config.kv_channels
        self.sharers = group_sharers(config, self.tp)
        column = partial(
            ColumnParallelLinear,
            config.hidden_size,
            mesh=mesh,
            bias=config.has_qkv_bias,
            sequence_parallel=sequence_parallel,
            init=Init(scale=config.init_method_std),
            dtype=dtype,
            device=device,
        )
        self.q = column((config.num_attention_heads, config.kv_channels))
        self.kv = column((config.num_query_groups, 2 * config.kv_channels), spill_dim=1)
        self.out = RowParallelLinear(
            config.query_size,
            config.hidden_size,
            mesh,
            bias=config.has_attention_out_bias,
            sequence_parallel=sequence_parallel,
            init=Init(scale=config.output_std),
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        x: Float[Tensor, "s b h"],
        encoded: Float[Tensor, "t b h"],
        mask: Mask,
        context: Context,
    ) -> Float[Tensor, "s b h"]:
        """Let every token of the decoder attend to the encoder's output as the mask allows.

        With sequence parallelism ``x``, ``encoded`` and the result are this rank's parts of their
        sequences; queries, keys and values are those of all of them, for this rank's heads.

        Args:
            x: the decoder's stream, normalised.
            encoded: the encoder's output; the length of its text may be another.
            mask: who may attend to whom, ``[b, s, t]`` of whole sequences. A token that may attend
                nowhere gets zeros before the projection back.
            context: what the layers of this pass share.
        """
        fused = self.kv(encoded)
        if self.sharers > 1:
            fused = own_group(fused, self.tp, self.sharers)
        k, v = fused.split(self.head_size, dim=-1)
        core = partial(self._attend, context, mask)
        y = context.recomputed("core_attn", core, self.q(x), k, v)
        result: Tensor = self.out(y.flatten(2))
        return result

    def _attend(self, context: Context, mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        site = CROSS_ATTENTION_PROBABILITIES
        drop = context.probability_drop(self.layer, self.first_head, site)
        return attention(q, k, v, mask, dropout=drop)
