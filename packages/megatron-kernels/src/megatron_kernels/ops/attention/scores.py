"""The score function of attention as one object: scale, soft-cap, biases and sinks."""

from dataclasses import dataclass, replace
from typing import Final

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.errors import KernelError


@dataclass(frozen=True, eq=False)
class Scores:
    """How attention scores a key for a query: ``cap(scale * q k^T) + bias - slope * |distance|``.

    It travels unchanged from a mixer to the kernel, through caches and context parallelism.

    Attributes:
        scale: Factor of the products. None means 1/sqrt(d).
        softcap: Scaled products x become softcap * tanh(x / softcap) (Gemma 2, arXiv 2408.00118,
            section 2). 0 means none.
        slopes: Slopes `[n]` of linear biases, one for each head: the distance of query and key in
            positions, times the slope, is subtracted (ALiBi; Press et al. 2022). Constants: they
            get no gradient from the block pair.
        bias: Biases `[b or 1, n, s, t]` that are added to the scaled products, such as learned
            biases by relative position (T5; Raffel et al. 2020, section 2.1). They get a gradient,
            except from the block pair.
        sinks: Logits `[n]`, one for each head, that take part in the softmax and have no value, so
            that a head may attend to nothing (gpt-oss; Xiao et al. 2023, "Efficient Streaming
            Language Models with Attention Sinks").
    """

    scale: float | None = None
    softcap: float = 0.0
    slopes: Float[Tensor, " n"] | None = None
    sinks: Float[Tensor, " n"] | None = None
    bias: Float[Tensor, "b_or_1 n s t"] | None = None

    def __post_init__(self) -> None:
        if not self.softcap >= 0:
            raise KernelError(f"scores: softcap is {self.softcap}; it must be 0 (none) or above")

    def check_shapes(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Verifies that there is one slope and one sink for each head, and a bias for each score.

        Raises:
            KernelError: The number of slopes or sinks is not ``heads``, or the biases are of other
                heads, queries or keys.
        """
        if self.bias is not None:
            found, needed = tuple(self.bias.shape), (heads, queries, keys)
            if found[1:] != needed or found[0] not in (1, batch):
                raise KernelError(
                    f"scores: bias has shape {list(found)}; these scores need "
                    f"{[batch, *needed]} or {[1, *needed]}"
                )
        self.check_heads(heads)

    def check_heads(self, heads: int) -> None:
        """Verifies that there is one slope and one sink for each head.

        Raises:
            KernelError: The number of slopes or sinks is not ``heads``.
        """
        for name, tensor in (("slopes", self.slopes), ("sinks", self.sinks)):
            if tensor is not None and tensor.shape != (heads,):
                raise KernelError(
                    f"scores: {name} have shape {list(tensor.shape)}; {heads} heads need [{heads}]"
                )

    def of_heads(self, first: int, count: int) -> "Scores":
        """Returns the scores of some neighbouring heads."""
        slopes, sinks = (
            None if x is None else x[first : first + count] for x in (self.slopes, self.sinks)
        )
        bias = None if self.bias is None else self.bias[:, first : first + count]
        return replace(self, slopes=slopes, sinks=sinks, bias=bias)

    def of_keys(self, count: int) -> "Scores":
        """Returns the scores of the first keys."""
        return self if self.bias is None else replace(self, bias=self.bias[..., :count])

    def without_sinks(self) -> "Scores":
        """Returns the scores of keys alone, for blocks of keys."""
        return self if self.sinks is None else replace(self, sinks=None)


PLAIN_SCORES: Final = Scores()
"""Products of queries and keys, divided by the root of the head dimension."""
