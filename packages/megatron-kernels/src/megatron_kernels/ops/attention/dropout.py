"""What attention takes as dropout of its probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int, Int32
from torch import Tensor

from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite


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
        self, samples: slice, heads: slice, length: int
    ) -> Callable[[slice, slice], Int32[Tensor, "b n s t"]]:
        """Returns a function of queries and keys: 1 for elements that are kept, 0 for others.

        Args:
            samples: Samples of the elements among those of the call.
            heads: Their heads among those of the call.
            length: Number of keys of the call.
        """


@dataclass(frozen=True, eq=False)
class DropoutHash:
    """What a kernel needs to compute the mask of an element: a hash, as of `bias_dropout_add`.

    The element of a head and a key is dropped if the hash of its channel, `(first_head + head) *
    length + column`, under the key of its query is less than the bound of the site.

    Attributes:
        word0: First words of the key of each query.
        word1: Second words.
        first_head: Added to the number of the head.
        length: Channels of a head.
        columns: Column of each key. None means its index.
        site: Numbers of the site and the probability.
    """

    word0: Int32[Tensor, "s b"]
    word1: Int32[Tensor, "s b"]
    first_head: int
    length: int
    columns: Int[Tensor, "b_or_1 t"] | None
    site: DropoutSite


@runtime_checkable
class HashedDropout(TiledDropout, Protocol):
    """Dropout whose mask is a hash, which the Triton kernels of attention compute themselves."""

    def hash_numbers(self, keys: int) -> DropoutHash:
        """Returns the numbers that determine the mask of a call.

        Args:
            keys: Number of keys of the call.
        """


DropoutLike = Callable[[Tensor], Tensor]
"""A function of all probabilities `[b, n, s, t]`; may be a `TiledDropout` or a `HashedDropout`."""
