"""Calls of attention, of blocks of a ring, and of paged attention; see `megatron_kernels.cases`."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from megatron_kernels.case import Case
from megatron_kernels.inputs import CaseDropout, InputGenerator, draw_words, of_rows
from megatron_kernels.ops.attention.attention import attention
from megatron_kernels.ops.attention.blocks import attention_backward, attention_forward
from megatron_kernels.ops.attention.index_scores import index_scores
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores
from megatron_kernels.ops.paged.attention import paged_attention
from megatron_kernels.ops.paged.pages import Pages


def _attention(
    draw: InputGenerator,
    mask: Mask,
    *,
    queries: int = 13,
    keys: int = 13,
    groups: int = 4,
    offset: int = 0,
    scores: Scores = PLAIN_SCORES,
) -> tuple[Any, ...]:
    """Returns a call. In other sizes all queries and keys are of one length."""
    if draw.size != "small":
        queries, keys, offset = (draw.rows(13, sequence=True),) * 2 + (0,)
        if not mask.causal:
            queries = draw.rows(13)
    q = draw.normal(queries, 2, 4, 16)
    k, v = draw.normal(keys, 2, groups, 16), draw.normal(keys, 2, groups, 16, mean=0.5)
    return (q, k, v, mask, scores, offset)


def _documents(draw: InputGenerator) -> tuple[Any, ...]:
    ids = torch.tensor([[0] * 5 + [1] * 8, [0] * 3 + [1] * 4 + [-1] * 6], dtype=torch.int32)
    ids = of_rows(ids, draw.rows(13, sequence=True))
    return _attention(draw, Mask(document_ids=ids.to(draw.device)), groups=2)


def _prefixes(draw: InputGenerator) -> tuple[Any, ...]:
    return _attention(draw, Mask(prefix=torch.tensor([4, 9], device=draw.device)))


def _block(
    draw: InputGenerator,
    *,
    triangle: bool = False,
    documents: bool = False,
    dropout: bool = False,
    groups: int = 4,
    width: int = 16,
) -> tuple[Any, ...]:
    """Returns a block of a ring: 11 queries after the keys, or among them."""
    rows = draw.rows(11, sequence=True)
    q, k, v = (
        draw.normal(rows, 2, 4, 16),
        draw.normal(rows, 2, groups, 16),
        draw.normal(rows, 2, groups, width),
    )
    first = torch.arange(rows, dtype=torch.int32, device=draw.device).expand(2, -1)
    drops = _drops(draw, q, k) if dropout else None
    if triangle:
        triangular = Mask(positions=first, query_positions=first, ascending=True)
        return (q, k, v, triangular, PLAIN_SCORES, 0, drops)
    of_queries = of_keys = None
    if documents:  # the second sequence has a row without keys, and padding
        ids = torch.tensor([[1] * 9 + [2] * 2, [4] + [3] * 8 + [-1] * 2], device=draw.device)
        of_queries = of_rows(ids, rows)
        ids = torch.tensor([[0] * 5 + [1] * 6, [3] * 11], device=draw.device)
        of_keys = of_rows(ids, rows)
    later = Mask(of_keys, first, query_document_ids=of_queries, query_positions=first + rows)
    return (q, k, v, later, PLAIN_SCORES, 0, drops)


def _block_backward(draw: InputGenerator, **options: Any) -> tuple[Any, ...]:
    """Returns the same with an output and an lse that count keys of another block."""
    q, k, v, mask, *rest = _block(draw, **options)
    q, k, v = (x.detach() for x in (q, k, v))
    wide = q.double(), k.double(), v.double()
    out, lse = attention_forward(*wide, mask, *rest, backend="reference")
    lse = torch.logaddexp(lse, draw.normal(*lse.shape).detach().double())
    statistics = torch.float64 if draw.dtype is torch.float64 else torch.float32
    dout = draw.normal(*out.shape).detach()
    return (dout, q, k, v, out.to(draw.dtype), lse.to(statistics), mask, *rest)


def _paged(
    draw: InputGenerator,
    *,
    new: int = 1,
    groups: int = 4,
    in_order: bool = False,
    width: int = 16,
    window: int | None = None,
    scores: Scores = PLAIN_SCORES,
) -> tuple[Any, ...]:
    """Returns the last tokens of three sequences in blocks of 5 keys; one has no keys at all."""
    longest = draw.rows(13, sequence=True)
    lengths = (longest, 0, longest * 2 // 3)
    used = -(-longest // 5)
    q = draw.normal(new, 3, 4, 16).detach()
    k = draw.normal(3 * used + 1, 5, groups, 16).detach()
    v = draw.normal(3 * used + 1, 5, groups, width, mean=0.5).detach()
    if in_order:
        starts = [1 + used * row for row in range(3)]
        return (q, k, v, Pages.consecutive(starts, lengths, 5, device=draw.device), window, scores)
    order = draw.integers(2**31, len(k)).argsort()[: 3 * used].view(3, used).to(torch.int32)
    lengths_of_slots = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    return (q, k, v, Pages(order, lengths_of_slots), window, scores)


def _index_scores(draw: InputGenerator) -> tuple[Any, ...]:
    rows, keys = draw.rows(5, sequence=True), draw.rows(9, sequence=True)
    return (
        draw.normal(rows, 2, 3, 8),
        draw.normal(keys, 2, 8),
        draw.normal(rows, 2, 3, mean=0.5),
    )


def _drops(draw: InputGenerator, q: Tensor, k: Tensor) -> CaseDropout:
    columns = draw.integers(1000, 2, k.shape[0])
    return CaseDropout(*draw_words(draw, *q.shape[:2]), columns)


def _dropped(draw: InputGenerator, mask: Mask, **options: Any) -> tuple[Any, ...]:
    arguments = _attention(draw, mask, **options)
    return (*arguments, _drops(draw, *arguments[:2]))


BLOCKS: Final[dict[str, dict[str, Any]]] = {
    "of one token range": {"triangle": True},
    "of earlier keys, grouped": {"groups": 2},
    "documents": {"documents": True, "groups": 1},
    "narrow values": {"width": 10},
    "of one token range, dropout": {"triangle": True, "dropout": True},
    "documents, dropout": {"documents": True, "dropout": True, "groups": 2},
}
PAGED: Final[dict[str, dict[str, Any]]] = {
    "one new token": {},
    "in order": {"in_order": True, "groups": 2},
    "several new tokens, grouped": {"new": 3, "groups": 2},
    "window": {"new": 2, "window": 4, "groups": 1},
    "window, in order": {"window": 4, "in_order": True},
    "soft-cap": {"scores": Scores(scale=0.3, softcap=2.0)},
    "narrow values": {"width": 10},
}
ATTENTION_CASES: Final = (
    Case(attention, "causal", partial(_attention, mask=Mask())),
    Case(attention, "causal, grouped", partial(_attention, mask=Mask(), groups=2)),
    Case(attention, "full", partial(_attention, mask=Mask(causal=False), keys=9)),
    Case(attention, "window", partial(_attention, mask=Mask(window=4), groups=1)),
    Case(attention, "dropout", partial(_dropped, mask=Mask())),
    Case(attention, "window, dropout", partial(_dropped, mask=Mask(window=4), groups=2)),
    Case(attention, "prefix", _prefixes),
    Case(attention, "documents", _documents),
    Case(attention, "cache", partial(_attention, mask=Mask(), queries=4, offset=7)),
    Case(attention, "decode", partial(_attention, mask=Mask(), queries=1, offset=9, groups=2)),
    *(
        Case(operation, label, partial(make, **options))
        for operation, make in (
            (attention_forward, _block),
            (attention_backward, _block_backward),
        )
        for label, options in BLOCKS.items()
    ),
    *(Case(paged_attention, label, partial(_paged, **options)) for label, options in PAGED.items()),
    Case(index_scores, "", _index_scores),
)
