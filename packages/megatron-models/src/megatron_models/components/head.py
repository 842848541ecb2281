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
