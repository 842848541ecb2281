"""Attention over packed documents, document by document, where the host knows their lengths.

A fused kernel with a mask tensor computes all pairs of tokens of a sequence and drops those of two
documents. Document by document it computes the pairs of each alone, and needs no mask tensor. Runs
of documents of one length are one call. Pieces are views, and autograd joins their gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_kernels.ops.attention.call import AttentionCall

Attend = Callable[[AttentionCall], Tensor]
"""Attention of one call whose mask is by index."""


def by_document(call: AttentionCall) -> bool:
    """Returns whether `over_documents` supports a call. Compiled code must not read the lengths."""
    return (
        call.mask.runs is not None
        and not torch.compiler.is_compiling()
        and call.dropout is None
        and call.scores.bias is None
        and call.mask.documents_alone(*call.extent())
    )


def over_documents(attend: Attend, call: AttentionCall) -> Tensor:
    """Returns attention `[s, b, n, dv]` of packed documents; zeros for padding."""
    rest = replace(call.mask, document_ids=None, runs=None), *call[4:]
    rows = [
        torch.cat(list(_pieces(attend, (call.q[:, i], call.k[:, i], call.v[:, i]), runs, rest)))
        for i, runs in enumerate(call.mask.runs or ())
    ]
    return rows[0].unsqueeze(1) if len(rows) == 1 else torch.stack(rows, 1)


def _pieces(
    attend: Attend, row: tuple[Tensor, ...], runs: tuple[int, ...], rest: tuple[Any, ...]
) -> Iterator[Tensor]:
    """Yields the outputs `[tokens, n, dv]` of neighbouring documents of one length.

    Args:
        attend: Computes the calls.
        row: Queries, keys and values `[tokens, n or g, d]` of one sequence.
        runs: Lengths of its documents; padding is negative.
        rest: The other fields of the calls.
    """
    equal = [(length, len(list(same))) for length, same in groupby(runs)]
    sizes = [abs(length) * count for length, count in equal]
    pieces = zip(*(torch.split(x, sizes) for x in row), strict=True)
    for (length, count), (q, k, v) in zip(equal, pieces, strict=True):
        if length < 0:
            yield q.new_zeros(*q.shape[:2], v.shape[-1])
            continue
        q, k, v = (x.unflatten(0, (count, length)).transpose(0, 1) for x in (q, k, v))
        yield attend(AttentionCall(q, k, v, *rest)).transpose(0, 1).flatten(0, 1)
