"""The experts of one layer: as many feed-forward layers, applied to rows sorted by expert.

Expert parallelism gives this rank some of them, expert tensor parallelism a part of the channels of
each, as column- and row-parallel layers have; answers are then partial sums.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from megatron_kernels import grouped_matmul
from megatron_parallel import ZEROS, Init, Mesh, Sharding
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.config import GPTConfig
from megatron_models.layers.mlp import activate

Cut = Literal["outputs", "inputs"]


class Experts(nn.Module):
    """``down(activation(up(x)))`` of every expert, by `grouped_matmul`."""

    def __init__(
        self,
        config: GPTConfig,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.activation = config.activation
        width = config.moe_ffn_hidden_size
        up = (2, width) if config.gated else (width,)
        stds = config.init_method_std, config.output_std
        sizes = (config.hidden_size, up), (width, (config.hidden_size,))
        cuts: tuple[Cut, Cut] = ("outputs", "inputs")
        self.up, self.down = (
            ExpertLinear(
                config.num_experts,
                inputs,
                outputs,
                mesh,
                cut=cut,
                bias=config.has_mlp_bias,
                init=Init(scale=std),
                dtype=dtype,
                device=device,
            )
            for std, (inputs, outputs), cut in zip(stds, sizes, cuts, strict=True)
        )

    def forward(self, x: Float[Tensor, "m h"], counts: Int[Tensor, " e"]) -> Float[Tensor, "m h"]:
        """Answer every row; ``counts`` are the rows of each of this rank's experts, in order."""
        answers: Tensor = self.down(activate(self.up(x, counts), self.activation), counts)
        return answers


class ExpertLinear(nn.Module):
    """A linear layer for each expert, weight ``(experts, *outputs, inputs)``.

    Args:
        experts: of the whole layer.
        inputs: size of a row.
        outputs: shape of an answer; of two dims the first enumerates fused weights.
        mesh: axis ``ep`` cuts the experts, ``expert_tp`` each of them.
        cut: what ``expert_tp`` cuts: the last dim of ``outputs``, or the inputs. Cut inputs give
            partial sums, to which each rank adds the bias of its own part of the channels.
        bias: whether there is one.
        init: how the weight starts; the bias starts at zero.
        dtype: of the parameters.
        device: of the parameters; by default the mesh's device.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: tuple[int, ...],
        mesh: Mesh,
        *,
        cut: Cut,
        bias: bool,
        init: Init,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        fused = 1 if len(outputs) > 1 else None
        last = len(outputs)  # dim of the outputs
        weight = Sharding(
            (experts, *outputs, inputs),
            "expert_tp",
            last if cut == "outputs" else last + 1,
            fused_dim=fused,
            experts=True,
            init=init,
        )
        self.sharding = {"weight": weight}
        if bias:
            self.sharding["bias"] = Sharding(
                (experts, *outputs), "expert_tp", last, fused_dim=fused, experts=True, init=ZEROS
            )
        place = mesh.device if device is None else device
        for name in ("weight", "bias"):
            given = None
            if name in self.sharding:
                shape = self.sharding[name].local_shape(mesh)
                given = nn.Parameter(torch.empty(shape, dtype=dtype, device=place))
            self.register_parameter(name, given)
        axis = mesh.axis("expert_tp")
        self.outputs = outputs[-1]
        self.start = outputs[-1] // axis.size * axis.index if cut == "inputs" else 0

    def forward(self, x: Float[Tensor, "m i"], counts: Int[Tensor, " e"]) -> Float[Tensor, "m ..."]:
        """Transform each row by its expert."""
        weight, bias = self.weight, self.bias
        y = grouped_matmul(x, weight.flatten(1, -2).transpose(1, 2), counts)
        if bias is not None:
            whole = bias.flatten(1)
            missing = y.shape[1] - whole.shape[1] - self.start  # channels of ranks after this one
            if self.start or missing:
                whole = functional.pad(whole, (self.start, missing))
            y = y + whole.repeat_interleave(counts, 0, output_size=len(y))
        return y.view(len(y), *weight.shape[1:-1])
