"""Router replay: the experts of one forward pass, to be used again in another.

In reinforcement learning the pass that computes a policy's log-probabilities should send each token
to the experts that generated it. Rounding alone may send it elsewhere.

    recorded = RouterReplay()
    model(tokens, router_replay=recorded)
    model(tokens, router_replay=recorded.replay())
"""

from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from megatron_models.errors import ConfigError


class RouterReplay:
    """The experts of each token in one forward pass of one micro-batch.

    Without ``experts`` the pass records its own; otherwise it uses them, with weights by its own
    scores. A recomputation of the pass does the same again. Under pipeline parallelism a rank has
    the layers of its stages; under context parallelism a rank has its part of the sequence, as of
    the tokens. All tensor-parallel ranks have the same values, with and without sequence
    parallelism, so another layout of these axes and of experts can replay them.

    Args:
        experts: Experts ``[b, s, k]`` of each token by global layer number; -1 for none.

    Attributes:
        experts: The same, or those recorded so far.
        recording: Whether a pass records.
    """

    def __init__(self, experts: Mapping[int, Int[Tensor, "b s k"]] | None = None) -> None:
        self.recording = experts is None
        self.experts: dict[int, Tensor] = dict(experts or {})

    def replay(self) -> "RouterReplay":
        """Returns an object with which a pass uses the recorded experts."""
        return RouterReplay(self.experts)

    def record(self, layer: int, experts: Int[Tensor, "b s k"]) -> None:
        """Records the experts of a layer.

        Raises:
            ConfigError: Another pass with other experts was recorded before.
        """
        before = self.experts.get(layer)
        if before is not None and not torch.equal(before, experts):
            raise ConfigError(
                f"the router replay already has other experts of layer {layer}; use a new "
                "RouterReplay for each forward pass"
            )
        self.experts[layer] = experts

    def experts_of(self, layer: int, shape: tuple[int, int, int]) -> Int[Tensor, "b s k"]:
        """Returns the experts of a layer.

        Raises:
            ConfigError: The layer is missing, or its experts have another shape.
        """
        if layer not in self.experts:
            known = ", ".join(map(str, sorted(self.experts))) or "none"
            raise ConfigError(
                f"the router replay has no experts of layer {layer}, only of layers {known}; "
                "record a pass of the same model"
            )
        found = self.experts[layer]
        if tuple(found.shape) != shape:
            raise ConfigError(
                f"the router replay has experts of shape {list(found.shape)} for layer {layer}, "
                f"not {list(shape)} [b, s, k]; record a pass of the same micro-batch"
            )
        return found
