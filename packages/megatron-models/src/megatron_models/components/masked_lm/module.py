"""The head of masked language models: linear layer, activation, norm, and a bias of the logits."""

from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.components.masked_lm.spec import MaskedLMSpec
from megatron_models.components.mlp.module import activation_of
from megatron_models.components.norm.module import Norm
from megatron_models.placement import Placement


class MaskedLMHead(nn.Module):
    """``norm(activation(dense(x)))``, the input of the output matrix.

    Attributes:
        bias: This rank's part of the bias of the logits, which the output matrix adds.
    """

    bias: nn.Parameter

    def __init__(self, spec: MaskedLMSpec, placement: Placement) -> None:
        super().__init__()
        placement.register_parameters(self, spec.bias())
        self.dense = placement.replicated_linear(spec.dense)
        self.activate = activation_of(spec.ungated, placement.backend)
        self.norm = Norm(spec.norm, placement)

    def forward(self, x: Float[Tensor, "part b h"]) -> Float[Tensor, "part b h"]:
        """Transforms each token of the sequence, or of this rank's part of it."""
        result: Tensor = self.norm(self.activate(self.dense(x)))
        return result
