"""One call of attention: what all its backends take."""

import math
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from megatron_kernels.errors import KernelError
from megatron_kernels.ops.attention.dropout import DropoutLike
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores


class AttentionCall(NamedTuple):
    """One call of attention.

    `attention`, `attention_forward` and `attention_backward` build it once from their arguments;
    their backends, and the functions that return why a backend does not support a call, take it. An
    option is a field here or one of `Scores`, and a line of `unsupported_option`; backends that do
    not name the option then refuse it.

    Compiled code builds it without a graph break, and building it costs less than a dataclass.

    Attributes:
        q: Queries `[s, b, n, d]`.
        k: Keys `[t, b, g, d]`; each of the g groups serves n/g neighbouring heads.
        v: Values `[t, b, g, dv]`.
        mask: Which queries may attend to which keys.
        scores: Scale, soft-cap, biases and sinks.
        query_offset: Index of the first query among the keys.
        dropout: Applied to the probabilities `[b, n, s, t]`; may be a `TiledDropout` or a
            `HashedDropout`. None means none.
    """

    q: Float[Tensor, "s b n d"]
    k: Float[Tensor, "t b g d"]
    v: Float[Tensor, "t b g dv"]
    mask: Mask
    scores: Scores = PLAIN_SCORES
    query_offset: int = 0
    dropout: DropoutLike | None = None

    def check_shapes(self) -> None:
        """Verifies that groups serve equal numbers of heads and that the scores fit the call.

        Raises:
            KernelError: n is not a multiple of g, slopes or sinks are not one for each head, or a
                bias is not one for each score.
        """
        (queries, batch, heads, _), (keys, _, groups, _) = self.q.shape, self.k.shape
        if heads % groups:
            raise KernelError(f"attention: {heads} heads do not divide over {groups} query groups")
        self.scores.check_shapes(batch, heads, queries, keys)

    def unsupported_option(self, *supported: str) -> str | None:
        """Returns that a backend does not support an option of this call, or None.

        Args:
            *supported: The options that the backend supports: "dropout" and names of fields of
                `Scores`. All backends support a scale.
        """
        scores = self.scores
        if self.dropout is not None and "dropout" not in supported:
            return "it does not support dropout"
        if scores.sinks is not None and "sinks" not in supported:
            return "it does not support sinks"
        if scores.softcap and "softcap" not in supported:
            return "it does not support softcap"
        if scores.slopes is not None and "slopes" not in supported:
            return "it does not support slopes"
        if scores.bias is not None and "bias" not in supported:
            return "it does not support a bias"
        return None

    def scale(self) -> float:
        """Returns the factor of the products of queries and keys."""
        scale = self.scores.scale
        return 1 / math.sqrt(self.q.shape[-1]) if scale is None else scale

    def extent(self) -> tuple[int, int, int]:
        """Returns the numbers of queries and keys and the query offset, as `Mask` takes them."""
        return self.q.shape[0], self.k.shape[0], self.query_offset

    def lower_mask(self) -> tuple[Bool[Tensor, "b_or_1 s t"] | None, bool]:
        """Returns the mask tensor, or None, and whether None means causal (`Mask.lower`)."""
        q = self.q
        return self.mask.lower(q.shape[0], self.k.shape[0], self.query_offset, device=q.device)

    def allowed(self) -> Bool[Tensor, "b_or_1 s t"]:
        """Returns the mask as a tensor, True = may attend (`Mask.allowed`)."""
        q = self.q
        return self.mask.allowed(q.shape[0], self.k.shape[0], self.query_offset, device=q.device)

    def without_unused_keys(self) -> "AttentionCall":
        """Returns the call without keys after the last query, which no query attends to.

        So unused room of a cache costs nothing. If the mask does not show that, all keys remain.
        """
        end = self.query_offset + self.q.shape[0]
        if self.k.shape[0] <= end or not (self.mask.causal and self.mask.keys_in_order):
            return self
        q, k, v, mask, scores = self[:5]
        return AttentionCall(q, k[:end], v[:end], mask, scores.of_keys(end), *self[5:])
