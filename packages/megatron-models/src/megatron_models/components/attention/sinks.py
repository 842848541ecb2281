"""Attention sinks: an extra logit for each head in every softmax, without a value."""

from jaxtyping import Float
from torch import Tensor, nn

from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.placement import Placement


class Sinks(nn.Module):
    """The sinks of the heads of one layer: learned (gpt-oss), or all 0 ("softmax off by one")."""

    weight: Tensor | None

    def __init__(self, spec: AttentionSpec, placement: Placement) -> None:
        super().__init__()
        placement.register_parameters(self, spec.sinks(), "weight")

    def forward(self, q: Float[Tensor, "s b n d"]) -> Float[Tensor, " n"]:
        """Returns the logits of this rank's heads, which are those of ``q``."""
        return q.new_zeros(q.shape[2]) if self.weight is None else self.weight
