"""Lookups: how an embedding reads rows of its weight, and where their gradient is added.

A `Lookup` is to `VocabParallelEmbedding` what a `Product` is to a linear layer. Without one, the
layer calls torch's embedding, whose gradient is a matrix as large as the weight in each backward
pass. `fuse_gradient_accumulation` lets a lookup add the rows to the main gradient instead.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_parallel import _compat
from megatron_parallel.tensor_parallel.product import AccumulateGradient


@runtime_checkable
class Lookup(Protocol):
    """Reads rows of a rank's part of a vocabulary."""

    def forward(
        self, tokens: Int[Tensor, "*tokens"], weight: Float[Tensor, "rows h"], start: int
    ) -> Float[Tensor, "*tokens h"]:
        """Returns the rows of tokens, zeros for absent ones. Differentiable by autograd.

        Args:
            tokens: Token ids of the whole vocabulary.
            weight: Rows of the tokens ``start``, ``start + 1``, ...
            start: Token of the first row.
        """

    def add_gradient(
        self,
        into: Float[Tensor, "rows h"],
        dy: Float[Tensor, "*tokens h"],
        tokens: Int[Tensor, "*tokens"],
        start: int,
        *,
        first: bool,
    ) -> None:
        """Adds the gradient of the weight to ``into``. The ``first`` gradient overwrites it."""


def select_rows(
    weight: Float[Tensor, "rows h"], tokens: Int[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens h"]:
    """Returns rows of a weight. On a CPU, `index_select` sums their gradients in float32.

    torch's `F.embedding` adds them up in the dtype of the weight there (torch 2.13): in
    bfloat16, a row that more than 256 tokens select has a wrong gradient. Compiled code and CUDA
    kernels add in float32.
    """
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        return weight.index_select(0, tokens.flatten()).view(*tokens.shape, weight.shape[1])
    return functional.embedding(tokens, weight)


class AccumulatingLookup:
    """A lookup whose gradient is added directly to a buffer. A copy is the lookup alone.

    Args:
        lookup: The lookup.
        accumulate: Adds the gradient from that of the rows and the tokens.
    """

    def __init__(self, lookup: Lookup, accumulate: AccumulateGradient) -> None:
        self.lookup, self.accumulate = lookup, accumulate
        self.add_gradient = lookup.add_gradient

    def forward(
        self, tokens: Int[Tensor, "*tokens"], weight: Float[Tensor, "rows h"], start: int
    ) -> Float[Tensor, "*tokens h"]:
        """Returns the rows of tokens."""
        if torch.compiler.is_compiling():  # compiled code cannot add to a buffer
            return self.lookup.forward(tokens, weight, start)
        rows: Tensor = _Rows.apply(weight, tokens, start, self)  # type: ignore[no-untyped-call]
        return rows

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the lookup without accumulation, so that copies do not share buffers."""
        return _same, (self.lookup,)


class _Rows(Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, tokens: Tensor, start: int, lookup: AccumulatingLookup
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.lookup = lookup
        return lookup.lookup.forward(tokens, weight, start)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not _compat.gradient_wanted(ctx, 0):
            return None, None, None, None
        (tokens,) = ctx.saved_tensors
        returned = _compat.gradient_returned(ctx, 0)
        return ctx.lookup.accumulate(grads[0], tokens, must_return=returned), None, None, None


def _same(lookup: Lookup) -> Lookup:
    return lookup
