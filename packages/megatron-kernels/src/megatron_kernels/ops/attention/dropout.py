"""What attention takes as dropout of its probabilities."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int32
from torch import Tensor


@runtime_checkable
class TiledDropout(Protocol):
    """Dropout whose mask is a function of the element, so that any part of it can be computed.

    Attributes:
        probability: Probability of dropping an element. The others are divided by 1 - probability.
    """

    @property
    def probability(self) -> float:
        """Probability of dropping an element."""

    def __call__(self, p: Float[Tensor, "b n s t"]) -> Float[Tensor, "b n s t"]:
        """Returns the probabilities of all heads, queries and keys of a call after dropout."""

    def kept(
        self, sample: int, heads: slice, queries: slice, keys: slice, length: int
    ) -> Int32[Tensor, "n s t"]:
        """Returns -1 for elements of a part of the probabilities that are kept, and 0 for others.

        A bitwise and with these words drops elements in place.

        Args:
            sample: Index of the sample among those of the call.
            heads: Heads of the part among those of the call.
            queries: Queries of the part.
            keys: Keys of the part.
            length: Number of keys of the call.
        """


DropoutLike = Callable[[Tensor], Tensor]
"""A function of all probabilities `[b, n, s, t]`, which may be a `TiledDropout`."""
