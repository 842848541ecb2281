"""Attention sinks: a logit for each head that takes its share of every softmax and has no value."""

import torch
from jaxtyping import Float
from megatron_parallel import Init, Mesh, Sharding
from torch import Tensor, nn

from megatron_models.config import GPTConfig


class Sinks(nn.Module):
    """The sinks of one layer's heads, learned (gpt-oss) or all 0 ("softmax off by one")."""

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.sharding: dict[str, Sharding] = {}
        self.register_parameter("weight", None)
        if config.softmax_type == "learnable":
            init = Init(scale=config.init_method_std)
            self.sharding["weight"] = Sharding((config.num_attention_heads,), "tp", 0, init=init)
            shape = self.sharding["weight"].local_shape(mesh)
            place = mesh.device if device is None else device
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=place))

    def forward(self, q: Float[Tensor, "s b n d"]) -> Float[Tensor, " n"]:
        """Return the logits of this rank's heads, those of ``q``."""
        weight: Tensor | None = self.weight
        return q.new_zeros(q.shape[2]) if weight is None else weight
