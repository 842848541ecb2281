"""The experts of one layer: feed-forward layers applied to rows that are sorted by expert.

With expert parallelism a rank holds some of the experts. With expert tensor parallelism it holds
part of each expert's channels, as in column- and row-parallel layers, and its outputs are partial
sums.
"""

from jaxtyping import Float, Int
from megatron_kernels import grouped_matmul, groups_of_rows
from megatron_parallel.tensor_parallel import add_product_parameters, bind_product, product_weights
from torch import Tensor, nn
from torch.nn import functional

from megatron_models.components.mlp.module import activation_of
from megatron_models.components.moe.spec import ExpertLinearSpec, MoESpec
from megatron_models.grouped_multiply import GroupedMultiply
from megatron_models.placement import Placement


class Experts(nn.Module):
    """``down(activation(up(x)))`` of each expert, by `grouped_matmul`."""

    def __init__(self, spec: MoESpec, placement: Placement) -> None:
        super().__init__()
        self.activate = activation_of(spec, placement.backend)
        self.up = ExpertLinear(spec.experts_up, placement)
        self.down = ExpertLinear(spec.experts_down, placement)

    def forward(
        self, x: Float[Tensor, "m h"], counts: Int[Tensor, " e"], has_tail: bool = False
    ) -> Float[Tensor, "m h"]:
        """Returns the output of each row; zero for rows after those of the last expert.

        Args:
            x: Rows, sorted by expert.
            counts: Rows of each expert on this rank.
            has_tail: Whether rows of no expert may follow.
        """
        y: Tensor = self.down(self.activate(self.up(x, counts, has_tail)), counts, has_tail)
        return y


class ExpertLinear(nn.Module):
    """A linear layer for each expert; ``ep`` divides the experts, ``expert_tp`` cuts each expert.

    The product multiplies rows by experts, so its own parameters have an expert dim too. With cut
    inputs the output is a partial sum, to which each rank adds the bias of its own channels.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: ExpertLinearSpec, placement: Placement) -> None:
        super().__init__()
        table = spec.shardings()
        product = placement.expert_product(spec.role)
        self.grouped_matmul = placement.bind(grouped_matmul)
        self.product_parameters = add_product_parameters(table, product)
        placement.register_parameters(self, table, "weight", "bias")
        self.product = bind_product(self, product, placement.mesh)
        axis, outputs = placement.mesh.axis("expert_tp"), spec.outputs[-1]
        self.start = outputs // axis.size * axis.index if spec.cut == "inputs" else 0

    def forward(
        self, x: Float[Tensor, "m i"], counts: Int[Tensor, " e"], has_tail: bool = False
    ) -> Float[Tensor, "m ..."]:
        """Transforms each row by its expert; rows of no expert give zeros."""
        weight, bias = self.weight, self.bias
        multiply = GroupedMultiply(counts, has_tail, self.grouped_matmul)
        y = self.product.forward(x, product_weights(self), None, multiply)
        if bias is not None:
            whole = bias.flatten(1)
            missing = y.shape[1] - whole.shape[1] - self.start  # channels of later ranks
            if self.start or missing or has_tail:  # the bias of the tail is 0
                whole = functional.pad(whole, (self.start, missing, 0, int(has_tail)))
            y = y + whole.index_select(0, groups_of_rows(counts, len(y)))
        # No view without need: torch's fully_shard warns of a module that returns one.
        return y if weight.dim() == 3 else y.view(len(y), *weight.shape[1:-1])
