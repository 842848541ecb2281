"""Lookups of token embeddings with a chosen backend."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from megatron_kernels import add_vocab_gradient, vocab_embedding
from torch import Tensor


@dataclass(frozen=True)
class KernelLookup:
    """Reads rows, and adds their gradient, with one backend of `megatron_kernels`.

    Attributes:
        backend: Backend of `vocab_embedding` and `add_vocab_gradient`.
    """

    backend: str

    def forward(
        self, tokens: Int[Tensor, "*tokens"], weight: Float[Tensor, "rows h"], start: int
    ) -> Float[Tensor, "*tokens h"]:
        """Returns the rows of tokens, zeros for absent ones."""
        return vocab_embedding(weight, tokens, start, backend=self.backend)

    def add_gradient(
        self,
        into: Float[Tensor, "rows h"],
        dy: Float[Tensor, "*tokens h"],
        tokens: Int[Tensor, "*tokens"],
        start: int,
        *,
        first: bool,
    ) -> None:
        """Adds the gradient of the weight to ``into``."""
        add_vocab_gradient(into, dy, tokens, start, first, backend=self.backend)
