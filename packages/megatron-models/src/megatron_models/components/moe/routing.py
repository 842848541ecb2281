"""The experts of each token, as a router returns them."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: Numbers of the experts ``[n, k]``, best first; -1 for none, such as for padding.
            If experts select tokens, ``k`` is the number of experts.
        weights: Weights of the experts' outputs ``[n, k]``, float32 or float64.
        logits: Logits of all experts ``[n, e]``, float32 or float64.
        unrestricted_experts: Numbers of the best experts ``[n, k]`` without biases, groups and
            other selections, which losses count; -1 for padding.
    """

    experts: Int[Tensor, "n k"]
    weights: Float[Tensor, "n k"]
    logits: Float[Tensor, "n e"]
    unrestricted_experts: Int[Tensor, "n top_k"]
