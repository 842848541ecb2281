"""Attention over packed documents, document by document, where the host knows their lengths.

A fused kernel with a mask tensor computes all pairs of tokens of a sequence and drops those of two
documents. Document by document it computes the pairs of each alone, and needs no mask tensor. Runs
of documents of one length are one call. Pieces are views, and autograd joins their gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import Scores

Attend = Callable[[Tensor, Tensor, Tensor, Mask, Scores], Tensor]
"""Attention of some queries, keys and values under a mask by index."""


def by_document(
    q: Tensor, k: Tensor, mask: Mask, scores: Scores, query_offset: int, *, dropout: bool
) -> bool:
    """Returns whether `over_documents` supports a call. Compiled code must not read the lengths."""
    return (
        not torch.compiler.is_compiling()
        and not dropout
        and scores.bias is None
        and mask.documents_alone(q.shape[0], k.shape[0], query_offset)
    )


def over_documents(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores
) -> Tensor:
    """Returns attention `[s, b, n, dv]` of packed documents; zeros for padding."""
    inside = replace(mask, document_ids=None, runs=None)
    rows = [
        torch.cat(list(_pieces(attend, (q[:, i], k[:, i], v[:, i]), runs, inside, scores)))
        for i, runs in enumerate(mask.runs or ())
    ]
    return rows[0].unsqueeze(1) if len(rows) == 1 else torch.stack(rows, 1)


def _pieces(
    attend: Attend, row: tuple[Tensor, ...], runs: tuple[int, ...], inside: Mask, scores: Scores
) -> Iterator[Tensor]:
    """Yields the outputs `[tokens, n, dv]` of neighbouring documents of one length."""
    equal = [(length, len(list(same))) for length, same in groupby(runs)]
    sizes = [abs(length) * count for length, count in equal]
    pieces = zip(*(torch.split(x, sizes) for x in row), strict=True)
    for (length, count), (q, k, v) in zip(equal, pieces, strict=True):
        if length < 0:
            yield q.new_zeros(*q.shape[:2], v.shape[-1])
            continue
        q, k, v = (x.unflatten(0, (count, length)).transpose(0, 1) for x in (q, k, v))
        yield attend(q, k, v, inside, scores).transpose(0, 1).flatten(0, 1)
