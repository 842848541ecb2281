"""Keys and values of sequences in blocks of a pool."""

from dataclasses import dataclass

from jaxtyping import Float
from megatron_kernels import AUTO, PLAIN_SCORES, Mask, Pages, Scores, attention, paged_attention
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PagedKV:
    """A ``KVHandle`` of keys and values in blocks, which attention reads in place.

    The new tokens of a sequence are its last ones, so their positions follow from `pages`.

    Attributes:
        k: Pool of keys.
        v: Pool of values.
        pages: Blocks and lengths of the sequences of a pass, new tokens included.
    """

    k: Float[Tensor, "blocks block_size g d"]
    v: Float[Tensor, "blocks block_size g dv"]
    pages: Pages

    def attend(
        self,
        q: Float[Tensor, "s b n d"],
        mask: Mask,
        *,
        query_offset: int = 0,
        scores: Scores = PLAIN_SCORES,
        backend: str = AUTO,
    ) -> Float[Tensor, "s b n dv"]:
        """Returns `megatron_kernels.paged_attention` of the new tokens.

        Other masks than causal ones with a window, scores with a bias and backends that
        `paged_attention` lacks take `megatron_kernels.attention` over gathered blocks.
        """
        if _is_causal(mask) and scores.bias is None and _reads_blocks(backend):
            return paged_attention(
                q, self.k, self.v, self.pages, mask.window, scores, backend=backend
            )
        k, v = (self.pages.gather(pool)[: query_offset + len(q)] for pool in (self.k, self.v))
        return attention(q, k, v, mask, scores, query_offset, backend=backend)


def _is_causal(mask: Mask) -> bool:
    """Returns whether causality and a window are all rules of a mask."""
    others = mask.document_ids, mask.prefix, mask.chunk
    return mask.causal and mask.has_rules and all(rule is None for rule in others)


def _reads_blocks(backend: str) -> bool:
    known = {AUTO, *(each.name for each in paged_attention.backends)}
    return known.issuperset(backend.split(","))
