"""Heads as plain data: what reads the end of a trunk beside the output matrix.

Importing this module does not import torch.
"""

from abc import ABC, abstractmethod

from megatron_models.components.mixer import LayerPass, Parameters


class Head(ABC):
    """A head of a model. A subclass is a frozen dataclass and defines the head's parameters."""

    @abstractmethod
    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters, in the order of the module."""

    @abstractmethod
    def activation_bytes(self, layer_pass: LayerPass) -> int:
        """Returns the bytes that the head saves for the backward pass, besides its input."""

    def shared_parameters(self, other: "Head | None") -> frozenset[str]:
        """Returns the names of the parameters that mean the same in another head.

        Weights of the other head can begin a training of them. Defaults to all, if the heads are
        equal.
        """
        return frozenset(self.parameters()) if self == other else frozenset()
