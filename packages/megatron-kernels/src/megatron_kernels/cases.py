"""Calls of every operation, for the commands and the tests.

Sizes are not round numbers. The cases cover the options that change the code path, and rows that a
careless kernel would turn into NaN. `InputGenerator.size` makes the same calls empty, of size one,
or large.
"""

from functools import partial
from typing import Any, Final, get_args

import torch

from megatron_kernels.attention_cases import ATTENTION_CASES
from megatron_kernels.case import Case
from megatron_kernels.inputs import InputGenerator, draw_words
from megatron_kernels.low_precision_cases import LOW_PRECISION_CASES
from megatron_kernels.ops.activation.bias_activation import bias_gelu, bias_swiglu
from megatron_kernels.ops.activation.gelu import gelu
from megatron_kernels.ops.activation.glu import Gate, glu
from megatron_kernels.ops.activation.pointwise import Pointwise, pointwise
from megatron_kernels.ops.activation.swiglu import swiglu
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
from megatron_kernels.ops.rope.frequencies import rope_frequencies, rope_tables
from megatron_kernels.ops.rope.rope import rope
from megatron_kernels.ops.rope.rope_qkv import rope_qkv
from megatron_kernels.ops.softmax.softmax import softmax
from megatron_kernels.ssm_cases import SSM_CASES


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
    *ATTENTION_CASES,
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
    *SSM_CASES,
)
