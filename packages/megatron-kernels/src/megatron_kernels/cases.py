"""Calls of every operation, for the commands and the tests.

Sizes are not round numbers. The cases cover the options that change the code path, and rows that a
careless kernel would turn into NaN. `InputGenerator.size` makes the same calls empty, of size one,
or large.
"""

from functools import partial
from typing import Any, Final, get_args

import torch
from torch import Tensor

from megatron_kernels.case import Case
from megatron_kernels.inputs import CaseDropout, InputGenerator, draw_words
from megatron_kernels.low_precision_cases import LOW_PRECISION_CASES
from megatron_kernels.ops.activation.bias_activation import bias_gelu, bias_swiglu
from megatron_kernels.ops.activation.gelu import gelu
from megatron_kernels.ops.activation.glu import Gate, glu
from megatron_kernels.ops.activation.pointwise import Pointwise, pointwise
from megatron_kernels.ops.activation.swiglu import swiglu
from megatron_kernels.ops.attention.attention import attention
from megatron_kernels.ops.attention.blocks import attention_backward, attention_forward
from megatron_kernels.ops.attention.index_scores import index_scores
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite, bias_dropout_add
from megatron_kernels.ops.embedding.vocab_embedding import add_vocab_gradient, vocab_embedding
from megatron_kernels.ops.linear.linear import linear
from megatron_kernels.ops.loss.cross_entropy import IGNORED, cross_entropy
from megatron_kernels.ops.loss.vocab_cross_entropy import (
    vocab_cross_entropy,
    vocab_cross_entropy_gradient,
)
from megatron_kernels.ops.moe.grouped_matmul import grouped_matmul
from megatron_kernels.ops.moe.permute import permute, sort_by_expert, unpermute
from megatron_kernels.ops.norm.add_norm import add_layer_norm, add_rms_norm
from megatron_kernels.ops.norm.layer_norm import layer_norm
from megatron_kernels.ops.norm.rms_norm import rms_norm
from megatron_kernels.ops.paged.attention import paged_attention
from megatron_kernels.ops.paged.pages import Pages
from megatron_kernels.ops.rope.frequencies import rope_frequencies, rope_tables
from megatron_kernels.ops.rope.rope import rope
from megatron_kernels.ops.rope.rope_qkv import rope_qkv
from megatron_kernels.ops.softmax.softmax import softmax
from megatron_kernels.ops.ssm.causal_conv import causal_conv
from megatron_kernels.ops.ssm.gated_delta_rule import gated_delta_rule
from megatron_kernels.ops.ssm.ssd_scan import ssd_scan


def _drops(draw: InputGenerator, q: Tensor, k: Tensor) -> CaseDropout:
    columns = draw.integers(1000, 2, k.shape[0])
    return CaseDropout(*draw_words(draw, *q.shape[:2]), columns)


def _dropped(draw: InputGenerator, mask: Mask, **options: Any) -> tuple[Any, ...]:
    arguments = _attention(draw, mask, **options)
    return (*arguments, _drops(draw, *arguments[:2]))


def _norm(draw: InputGenerator, *, bias: bool, zero_centered: bool = False) -> tuple[Any, ...]:
    shift = (draw.normal(43),) if bias else ()
    gain = draw.normal(43, mean=0 if zero_centered else 1)
    return (draw.normal(draw.rows(7), 3, 43, mean=0.5), gain, *shift, 1e-5, zero_centered)


def _norm_without_bias(draw: InputGenerator) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(7), 3, 43, mean=0.5), draw.normal(43, mean=1), None, 1e-5)


def _add_norm(draw: InputGenerator, adds: bool = True, **options: Any) -> tuple[Any, ...]:
    x, *rest = _norm(draw, **options)
    return (x, draw.normal(*x.shape) if adds else None, *rest)


def _pointwise(draw: InputGenerator, kind: str) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 2, 31), kind)


def _glu(
    draw: InputGenerator, gate: str, bound: float = 0.0, offset: float = 0.0
) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 3, 2, 31), gate, bound, offset)


def _gelu(draw: InputGenerator, approximate: str) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 2, 31), approximate)


def _swiglu(draw: InputGenerator) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 3, 2, 31),)


def _bias_gelu(draw: InputGenerator, approximate: str) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 2, 31), draw.normal(31), approximate)


def _bias_swiglu(draw: InputGenerator) -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 3, 2, 31), draw.normal(2, 31))


def _dropout_add(draw: InputGenerator, *, bias: bool) -> tuple[Any, ...]:
    rows = draw.rows(9)
    return (
        draw.normal(rows, 3, 43),
        draw.normal(43) if bias else None,
        draw.normal(rows, 3, 43, mean=0.5),
        *draw_words(draw, rows, 3),
        DropoutSite(-(2**31) + 5, 123456789, -(2**31) + 2**30, 4 / 3),
    )


def _softmax(draw: InputGenerator, *, masked: bool) -> tuple[Any, ...]:
    rows = draw.rows(3)
    if not masked:
        return (draw.normal(rows, 5, 17), None, 0.7)
    allowed = draw.integers(3, rows, 5, 17) > 0
    allowed[1:2, 2] = False
    return (draw.normal(rows, 5, 17), allowed, 0.7)


def _rope(
    draw: InputGenerator, *, interleaved: bool, percent: float, batch: int
) -> tuple[Any, ...]:
    rows = draw.rows(11, sequence=True)
    positions = torch.arange(rows, device=draw.device)
    if batch > 1:
        positions = torch.stack([positions + 100 * i for i in range(batch)])
    table = torch.float64 if draw.dtype is torch.float64 else torch.float32
    tables = rope_tables(
        positions, rope_frequencies(16, percent=percent, device=draw.device), table
    )
    return (draw.normal(rows, max(batch, 2), 3, 16), *tables, interleaved)


def _rope_qkv(
    draw: InputGenerator,
    *,
    queries: int,
    groups: int = 3,
    interleaved: bool = False,
    percent: float = 1.0,
) -> tuple[Any, ...]:
    x, *rest = _rope(draw, interleaved=interleaved, percent=percent, batch=2)
    return (draw.normal(*x.shape[:2], groups, queries + 2, 16), *rest, groups == 1)


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
    ids = _of_rows(ids, draw.rows(13, sequence=True))
    return _attention(draw, Mask(document_ids=ids.to(draw.device)), groups=2)


def _of_rows(x: Tensor, rows: int) -> Tensor:
    """Returns the first columns of a row for each sample, or stretches the columns."""
    width = x.shape[1]
    return x[:, :rows] if rows <= width else x.repeat_interleave(-(-rows // width), 1)[:, :rows]


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
    own = others = None
    if documents:  # the second sequence has a row without keys, and padding
        own = torch.tensor([[1] * 9 + [2] * 2, [4] + [3] * 8 + [-1] * 2], device=draw.device)
        others = torch.tensor([[0] * 5 + [1] * 6, [3] * 11], device=draw.device)
        own, others = _of_rows(own, rows), _of_rows(others, rows)
    later = Mask(others, first, query_document_ids=own, query_positions=first + rows)
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
    held = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    return (q, k, v, Pages(order, held), window, scores)


def _linear(draw: InputGenerator, rows: tuple[int, ...], *, bias: bool) -> tuple[Any, ...]:
    first, *others = rows
    x = draw.normal(draw.rows(first), *others, 43)
    return (x, draw.normal(29, 43), draw.normal(29) if bias else None)


def _cross_entropy(draw: InputGenerator) -> tuple[Any, ...]:
    rows = draw.rows(5)
    targets = draw.integers(37, rows, 3)
    targets[2:3, 1] = IGNORED
    return (draw.normal(rows, 3, 37), targets)


def _vocab_loss(draw: InputGenerator, valid: int) -> tuple[Any, ...]:
    rows = draw.rows(5)
    targets = draw.integers(50, rows, 3) - 7  # some are in another part
    return (draw.normal(rows, 3, 37).detach(), targets, valid)


def _vocab_loss_gradient(
    draw: InputGenerator, valid: int, *, everywhere: float, overwrites: bool
) -> tuple[Any, ...]:
    logits, targets, valid = _vocab_loss(draw, valid)
    wide = torch.promote_types(draw.dtype, torch.float32)
    rows = targets.shape
    lse, dloss = 4 + draw.normal(*rows).detach().to(wide), draw.normal(*rows).detach().to(wide)
    dloss[1:2, 1] = 0.0
    smoothing = 1 - everywhere * 37
    return (logits, targets, lse, dloss, valid, smoothing, everywhere, overwrites)


def _vocab_embedding(draw: InputGenerator) -> tuple[Any, ...]:
    return (draw.normal(17, 43), draw.integers(40, draw.rows(5), 3), 11)


def _vocab_gradient(draw: InputGenerator, *, first: bool) -> tuple[Any, ...]:
    tokens = draw.integers(40, draw.rows(9), 5)
    into = draw.normal(17, 43).detach().to(torch.promote_types(draw.dtype, torch.float32))
    return (into, draw.normal(*tokens.shape, 43).detach(), tokens, 11, first)


def _grouped(draw: InputGenerator, counts: tuple[int, ...], tail: int = 0) -> tuple[Any, ...]:
    counts = tuple(map(draw.rows, counts))
    x, weight = draw.normal(sum(counts) + tail, 24), draw.normal(len(counts), 16, 24)
    return (x, weight.transpose(1, 2), torch.tensor(counts, device=draw.device), tail > 0)


def _order(draw: InputGenerator, choices: int, rows: str) -> torch.Tensor:
    """Returns the order of rows of the choices of nine tokens, the fourth without an expert."""
    experts = draw.integers(5, draw.rows(9), choices)
    experts[3:4] = -1
    order = sort_by_expert(experts, 5).order
    if rows == "first":
        return order[: 2 * len(order) // 3]
    return torch.where(order % 3 == 1, -1, order) if rows == "some" else order


def _permute(draw: InputGenerator, choices: int = 2, rows: str = "all") -> tuple[Any, ...]:
    return (draw.normal(draw.rows(9), 7), _order(draw, choices, rows), choices)


def _unpermute(draw: InputGenerator, choices: int = 2, rows: str = "all") -> tuple[Any, ...]:
    order = _order(draw, choices, rows)
    return (draw.normal(len(order), 7), order, draw.normal(draw.rows(9), choices))


def _some_documents(draw: InputGenerator) -> torch.Tensor:
    """Returns ids of two sequences: three documents, and one that ends before the padding."""
    ids = torch.tensor([[4] * 2 + [7] * 1 + [5] * 8, [0] * 8 + [-1] * 3], device=draw.device)
    return _of_rows(ids, draw.rows(11, sequence=True))


def _causal_conv(
    draw: InputGenerator, *, documents: bool = False, state: bool = False
) -> tuple[Any, ...]:
    return (
        draw.normal(draw.rows(11, sequence=documents), 2, 6),
        draw.normal(6, 4),
        draw.normal(6),
        _some_documents(draw) if documents else None,
        draw.normal(2, 3, 6) if state else None,
    )


def _gated_delta_rule(
    draw: InputGenerator, *, documents: bool = False, state: bool = False
) -> tuple[Any, ...]:
    decay = draw.normal(draw.rows(11, sequence=True), 2, 4)
    return (
        draw.normal(draw.rows(11, sequence=True), 2, 2, 5),
        draw.normal(draw.rows(11, sequence=True), 2, 2, 5, mean=0.1),
        draw.normal(draw.rows(11, sequence=True), 2, 4, 3),
        (-decay.detach().abs()).requires_grad_(),
        draw.normal(draw.rows(11, sequence=True), 2, 4, mean=0.5)
        .detach()
        .sigmoid()
        .requires_grad_(),
        _some_documents(draw) if documents else None,
        draw.normal(2, 4, 5, 3) if state else None,
        True,
    )


def _ssd_scan(
    draw: InputGenerator, *, documents: bool = False, state: bool = False, chunk_size: int = 4
) -> tuple[Any, ...]:
    rows = draw.rows(11, sequence=True)
    return (
        draw.normal(rows, 2, 4, 3),
        draw.normal(rows, 2, 4),
        (-draw.normal(4).exp()).detach().requires_grad_(),
        draw.normal(rows, 2, 2, 5),
        draw.normal(rows, 2, 2, 5, mean=0.2),
        draw.normal(4),
        draw.normal(4, mean=-1),
        _some_documents(draw) if documents else None,
        draw.normal(2, 4, 3, 5) if state else None,
        chunk_size,
    )


def _index_scores(draw: InputGenerator) -> tuple[Any, ...]:
    rows, keys = draw.rows(5, sequence=True), draw.rows(9, sequence=True)
    return (
        draw.normal(rows, 2, 3, 8),
        draw.normal(keys, 2, 8),
        draw.normal(rows, 2, 3, mean=0.5),
    )


BLOCKS: Final[dict[str, dict[str, Any]]] = {
    "of one token range": {"triangle": True},
    "of earlier keys, grouped": {"groups": 2},
    "documents": {"documents": True, "groups": 1},
    "narrow values": {"width": 10},
    "of one token range, dropout": {"triangle": True, "dropout": True},
    "documents, dropout": {"documents": True, "dropout": True, "groups": 2},
}
PACKED: Final[dict[str, dict[str, Any]]] = {
    "one head for a group": {"queries": 1},
    "interleaved, grouped": {"queries": 4, "interleaved": True},
    "partial, grouped": {"queries": 2, "percent": 0.5},
    "one group, repeated": {"queries": 4, "percent": 0.5, "groups": 1},
}
ROWS: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "one choice": {"choices": 1},
    "fewer rows than choices": {"choices": 3, "rows": "first"},
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
CASES = (
    Case(layer_norm, "", partial(_norm, bias=True)),
    Case(layer_norm, "no bias", _norm_without_bias),
    Case(layer_norm, "1 + weight", partial(_norm, bias=True, zero_centered=True)),
    Case(rms_norm, "", partial(_norm, bias=False)),
    Case(rms_norm, "1 + weight", partial(_norm, bias=False, zero_centered=True)),
    Case(add_layer_norm, "", partial(_add_norm, bias=True)),
    Case(add_layer_norm, "1 + weight", partial(_add_norm, bias=True, zero_centered=True)),
    Case(add_rms_norm, "", partial(_add_norm, bias=False)),
    Case(add_rms_norm, "nothing added", partial(_add_norm, bias=False, adds=False)),
    Case(add_rms_norm, "1 + weight", partial(_add_norm, bias=False, zero_centered=True)),
    Case(bias_gelu, "exact", partial(_bias_gelu, approximate="none")),
    Case(bias_gelu, "tanh", partial(_bias_gelu, approximate="tanh")),
    Case(bias_swiglu, "", _bias_swiglu),
    Case(bias_dropout_add, "", partial(_dropout_add, bias=False)),
    Case(bias_dropout_add, "bias", partial(_dropout_add, bias=True)),
    Case(gelu, "exact", partial(_gelu, approximate="none")),
    Case(gelu, "tanh", partial(_gelu, approximate="tanh")),
    Case(swiglu, "", _swiglu),
    *(
        Case(pointwise, kind.replace("_", " "), partial(_pointwise, kind=kind))
        for kind in get_args(Pointwise)
    ),
    *(Case(glu, gate.replace("_", " "), partial(_glu, gate=gate)) for gate in get_args(Gate)),
    Case(glu, "bounds and offset", partial(_glu, gate="quick_gelu", bound=0.75, offset=1.0)),
    Case(softmax, "everywhere", partial(_softmax, masked=False)),
    Case(softmax, "masked", partial(_softmax, masked=True)),
    Case(rope, "halves", partial(_rope, interleaved=False, percent=1.0, batch=1)),
    Case(rope, "interleaved", partial(_rope, interleaved=True, percent=1.0, batch=2)),
    Case(rope, "partial", partial(_rope, interleaved=False, percent=0.5, batch=2)),
    *(Case(rope_qkv, label, partial(_rope_qkv, **cut)) for label, cut in PACKED.items()),
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
    Case(linear, "", partial(_linear, rows=(7, 3), bias=True)),
    Case(linear, "several tiles", partial(_linear, rows=(150,), bias=False)),
    *LOW_PRECISION_CASES,
    Case(cross_entropy, "", _cross_entropy),
    Case(vocab_cross_entropy, "", partial(_vocab_loss, valid=37)),
    Case(vocab_cross_entropy, "padding", partial(_vocab_loss, valid=30)),
    Case(vocab_cross_entropy, "padding alone", partial(_vocab_loss, valid=0)),
    Case(
        vocab_cross_entropy_gradient,
        "",
        partial(_vocab_loss_gradient, valid=37, everywhere=0.0, overwrites=False),
    ),
    Case(
        vocab_cross_entropy_gradient,
        "padding, smoothing, in place",
        partial(_vocab_loss_gradient, valid=30, everywhere=0.01, overwrites=True),
        True,
    ),
    Case(vocab_embedding, "", _vocab_embedding),
    Case(add_vocab_gradient, "", partial(_vocab_gradient, first=False), True),
    Case(add_vocab_gradient, "first", partial(_vocab_gradient, first=True), True),
    Case(grouped_matmul, "", partial(_grouped, counts=(5, 0, 11, 1))),
    Case(grouped_matmul, "one group", partial(_grouped, counts=(0, 0, 8))),
    Case(grouped_matmul, "tail", partial(_grouped, counts=(5, 0, 11, 1), tail=6)),
    *(
        Case(operation, label, partial(make, **options))
        for operation, make in ((permute, _permute), (unpermute, _unpermute))
        for label, options in ROWS.items()
    ),
    Case(unpermute, "rows of no choice", partial(_unpermute, rows="some")),
    Case(causal_conv, "", _causal_conv),
    Case(causal_conv, "state", partial(_causal_conv, state=True)),
    Case(causal_conv, "documents and state", partial(_causal_conv, documents=True, state=True)),
    Case(gated_delta_rule, "", _gated_delta_rule),
    Case(gated_delta_rule, "state", partial(_gated_delta_rule, state=True)),
    Case(
        gated_delta_rule,
        "documents and state",
        partial(_gated_delta_rule, documents=True, state=True),
    ),
    Case(ssd_scan, "", _ssd_scan),
    Case(ssd_scan, "state, one chunk", partial(_ssd_scan, state=True, chunk_size=32)),
    Case(ssd_scan, "documents and state", partial(_ssd_scan, documents=True, state=True)),
)
