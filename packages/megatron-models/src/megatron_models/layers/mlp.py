"""The feed-forward layer: up, activation, down."""

import torch
from jaxtyping import Float
from megatron_kernels import gelu, swiglu
from megatron_parallel import Init, Mesh
from megatron_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_models.config import Activation, GPTConfig


class MLP(nn.Module):
    """``down(activation(up(x)))``; with SwiGLU ``up`` is gate and up together, ``(2, f, h)``.

    ``width`` is f, by default the configuration's ``ffn_hidden_size``.
    """

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device | str | None,
        sequence_parallel: bool = False,
        width: int | None = None,
    ) -> None:
        super().__init__()
        width = config.ffn_hidden_size if width is None else width
        self.activation = config.activation
        self.up = ColumnParallelLinear(
            config.hidden_size,
            (2, width) if config.gated else width,
            mesh,
            bias=config.has_mlp_bias,
            dim=1 if config.gated else 0,
            fused_dim=0 if config.gated else None,
            sequence_parallel=sequence_parallel,
            init=Init(scale=config.init_method_std),
            dtype=dtype,
            device=device,
        )
        self.down = RowParallelLinear(
            width,
            config.hidden_size,
            mesh,
            bias=config.has_mlp_bias,
            sequence_parallel=sequence_parallel,
            init=Init(scale=config.output_std),
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Float[Tensor, "s b h"]) -> Float[Tensor, "s b h"]:
        """Transform every token by itself; all of the sequence, or this rank's part."""
        result: Tensor = self.down(activate(self.up(x), self.activation))
        return result


def activate(x: Float[Tensor, "..."], activation: Activation) -> Float[Tensor, "... f"]:
    """Apply an activation by its configured name; ``swiglu`` takes ``[..., 2, f]``."""
    if activation == "swiglu":
        return swiglu(x)
    return gelu(x, "tanh" if activation == "gelu_tanh" else "none")
