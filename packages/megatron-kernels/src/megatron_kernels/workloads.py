"""Calls of operations at the sizes of models; see `megatron_kernels.workload`."""

from typing import Any, Final

import torch
from torch import Tensor

from megatron_kernels.inputs import CaseDropout, InputGenerator, draw_words
from megatron_kernels.low_precision_workloads import LOW_PRECISION_WORKLOADS
from megatron_kernels.ops.activation.bias_activation import bias_gelu, bias_swiglu
from megatron_kernels.ops.activation.gelu import gelu
from megatron_kernels.ops.activation.swiglu import swiglu
from megatron_kernels.ops.attention.attention import attention
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import PLAIN_SCORES, Scores
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite, bias_dropout_add
from megatron_kernels.ops.embedding.vocab_embedding import vocab_embedding
from megatron_kernels.ops.linear.linear import linear
from megatron_kernels.ops.loss.cross_entropy import cross_entropy
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
from megatron_kernels.workload import EXPERTS, HEAD, RECOMPUTED, Shape, Workload


def _stream(draw: InputGenerator, shape: Shape) -> Tensor:
    return draw.normal(shape.tokens, 1, shape.width)


def _heads(draw: InputGenerator, shape: Shape, groups: int | None = None) -> Tensor:
    return draw.normal(shape.tokens, 1, groups or shape.heads, HEAD)


def _rope(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    table = torch.float64 if draw.dtype is torch.float64 else torch.float32
    positions = torch.arange(shape.tokens, device=draw.device)
    tables = rope_tables(positions, rope_frequencies(HEAD, device=draw.device), table)
    return (_heads(draw, shape), *tables, False)


def _rope_qkv(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    """Returns groups of two heads of queries."""
    fused = draw.normal(shape.tokens, 1, max(1, shape.heads // 2), 4, HEAD)
    return (fused, *_rope(draw, shape)[1:], False)


def _dropout(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    words = (draw.integers(2**31, shape.tokens, 1).to(torch.int32) for _ in range(2))
    site = DropoutSite(7, 11, -(2**31) + 2**29, 8 / 7)  # an eighth is dropped
    return (_stream(draw, shape), None, _stream(draw, shape), *words, site)


def _attention(
    draw: InputGenerator, shape: Shape, mask: Mask, groups: int | None = None
) -> tuple[Any, ...]:
    k, v = (_heads(draw, shape, groups) for _ in range(2))
    prepared = mask.prepare(shape.tokens, shape.tokens, device=draw.device)
    return (_heads(draw, shape), k, v, prepared, PLAIN_SCORES, 0, None)


def _softcap(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    q, k, v, mask, _, *rest = _attention(draw, shape, Mask())
    return (q, k, v, mask, Scores(softcap=30.0), *rest)


def _dropped(
    draw: InputGenerator, shape: Shape, mask: Mask, groups: int | None = None
) -> tuple[Any, ...]:
    """Returns attention that drops a quarter of its probabilities."""
    *arguments, _ = _attention(draw, shape, mask, groups)
    words = draw_words(draw, shape.tokens, 1)
    return (*arguments, CaseDropout(*words, first_head=0, length=shape.tokens))


def _packed(shape: Shape, device: torch.device) -> Mask:
    """Returns the mask of eight documents of one length."""
    ids = torch.arange(8, dtype=torch.int32, device=device)
    return Mask(ids.repeat_interleave(shape.tokens // 8)[None])


def _decode(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    """Returns one token of each of 16 sequences, without gradients."""
    q = draw.normal(1, 16, shape.heads, HEAD).detach()
    k, v = (draw.normal(shape.tokens, 16, shape.heads, HEAD).detach() for _ in range(2))
    return (q, k, v, Mask(), PLAIN_SCORES, shape.tokens - 1, None)


def _paged_decode(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    """Returns the same as `_decode` from a pool of blocks of 16 tokens, without gradients."""
    q = draw.normal(1, 16, shape.heads, HEAD).detach()
    blocks = -(-shape.tokens // 16)
    k, v = (draw.normal(16 * blocks, 16, shape.heads, HEAD).detach() for _ in range(2))
    starts = [blocks * row for row in range(16)]
    pages = Pages.consecutive(starts, [shape.tokens] * 16, 16, device=draw.device)
    return (q, k, v, pages, None, PLAIN_SCORES)


def _linear(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    return (_stream(draw, shape), draw.normal(4 * shape.width, shape.width), None)


def _order(draw: InputGenerator, shape: Shape) -> Tensor:
    return sort_by_expert(draw.integers(EXPERTS, shape.tokens, 2), EXPERTS).order


def _grouped(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    counts = torch.full((EXPERTS,), 2 * shape.tokens // EXPERTS, device=draw.device)
    x = draw.normal(2 * shape.tokens, shape.width)
    return (x, draw.normal(EXPERTS, shape.width, shape.width), counts, False)


def _ssd(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    of_groups = (shape.tokens, 1, 1, HEAD)
    return (
        _heads(draw, shape),
        draw.normal(shape.tokens, 1, shape.heads),
        (-draw.normal(shape.heads).exp()).detach().requires_grad_(),
        draw.normal(*of_groups),
        draw.normal(*of_groups),
    )


def _ssd_decode(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    """Returns one token of each of 16 sequences, without gradients."""
    of_groups = (1, 16, 1, HEAD)
    given = (
        draw.normal(1, 16, shape.heads, HEAD),
        draw.normal(1, 16, shape.heads),
        -draw.normal(shape.heads).exp(),
        *(draw.normal(*of_groups) for _ in range(2)),
    )
    state = draw.normal(16, shape.heads, HEAD, HEAD).detach()
    kept = state.to(torch.promote_types(state.dtype, torch.float32))
    return (*(each.detach() for each in given), None, None, None, kept)


def _conv_decode(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    """Returns the same of a convolution."""
    given = (draw.normal(1, 16, shape.width), draw.normal(shape.width, 4), draw.normal(shape.width))
    state = draw.normal(16, 3, shape.width).detach()
    return (*(each.detach() for each in given), None, state)


def _delta_rule(draw: InputGenerator, shape: Shape) -> tuple[Any, ...]:
    gate = draw.normal(shape.tokens, 1, shape.heads)
    return (
        *(_heads(draw, shape) for _ in range(3)),
        (-gate.detach().abs()).requires_grad_(),
        gate.detach().sigmoid().requires_grad_(),
        None,
        None,
        True,
    )


def _attention_products(shape: Shape) -> float:
    return 4.0 * shape.tokens**2 * shape.width


def _logits(draw: InputGenerator, shape: Shape) -> tuple[Tensor, Tensor]:
    logits = draw.normal(shape.tokens, shape.vocabulary).detach()
    return logits, draw.integers(shape.vocabulary, shape.tokens)


def _losses(draw: InputGenerator, shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns log-sum-exps and gradients of losses."""
    wide = torch.promote_types(draw.dtype, torch.float32)
    numbers = draw.normal(shape.tokens).detach().to(wide)
    return numbers + 9, numbers


WORKLOADS: Final = (
    Workload(
        layer_norm,
        "",
        lambda d, s: (_stream(d, s), d.normal(s.width), d.normal(s.width, mean=1), 1e-5, False),
    ),
    Workload(rms_norm, "", lambda d, s: (_stream(d, s), d.normal(s.width, mean=1), 1e-5, False)),
    Workload(
        add_layer_norm,
        "",
        lambda d, s: (
            *(_stream(d, s) for _ in range(2)),
            *(d.normal(s.width, mean=each) for each in (1, 0)),
            1e-5,
            False,
        ),
    ),
    Workload(
        add_rms_norm,
        "",
        lambda d, s: (*(_stream(d, s) for _ in range(2)), d.normal(s.width, mean=1), 1e-5, False),
    ),
    Workload(bias_dropout_add, "", _dropout),
    Workload(
        bias_gelu,
        "tanh",
        lambda d, s: (d.normal(s.tokens, 1, 4 * s.width), d.normal(4 * s.width), "tanh"),
    ),
    Workload(
        bias_swiglu,
        "",
        lambda d, s: (d.normal(s.tokens, 1, 2, 4 * s.width), d.normal(2, 4 * s.width)),
    ),
    Workload(gelu, "tanh", lambda d, s: (d.normal(s.tokens, 1, 4 * s.width), "tanh")),
    Workload(swiglu, "", lambda d, s: (d.normal(s.tokens, 1, 2, 4 * s.width),)),
    Workload(softmax, "", lambda d, s: (d.normal(s.heads, 256, s.tokens), None, 0.125)),
    Workload(rope, "", _rope),
    Workload(rope_qkv, "", _rope_qkv),
    Workload(
        vocab_embedding,
        "",
        lambda d, s: (d.normal(s.vocabulary, s.width), d.integers(s.vocabulary, s.tokens), 0),
    ),
    Workload(
        attention,
        "causal",
        lambda d, s: _attention(d, s, Mask()),
        lambda s: _attention_products(s) / 2,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "causal, grouped",
        lambda d, s: _attention(d, s, Mask(), max(1, s.heads // 4)),
        lambda s: _attention_products(s) / 2,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "full",
        lambda d, s: _attention(d, s, Mask(causal=False)),
        _attention_products,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "soft-cap",
        _softcap,
        lambda s: _attention_products(s) / 2,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "causal, dropout",
        lambda d, s: _dropped(d, s, Mask()),
        lambda s: _attention_products(s) / 2,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "causal, grouped, dropout",
        lambda d, s: _dropped(d, s, Mask(), max(1, s.heads // 4)),
        lambda s: _attention_products(s) / 2,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "8 documents",
        lambda d, s: _attention(d, s, _packed(s, d.device)),
        lambda s: _attention_products(s) / 16,
        RECOMPUTED,
    ),
    Workload(
        attention,
        "8 documents, dropout",
        lambda d, s: _dropped(d, s, _packed(s, d.device)),
        lambda s: _attention_products(s) / 16,
        RECOMPUTED,
    ),
    Workload(attention, "decode, 16 sequences", _decode, lambda s: 64.0 * s.tokens * s.width),
    Workload(
        paged_attention,
        "decode, 16 sequences",
        _paged_decode,
        lambda s: 64.0 * s.tokens * s.width,
    ),
    Workload(linear, "", _linear, lambda s: 8.0 * s.tokens * s.width**2),
    Workload(
        cross_entropy,
        "",
        lambda d, s: (d.normal(s.tokens, s.vocabulary), d.integers(s.vocabulary, s.tokens)),
    ),
    Workload(vocab_cross_entropy, "", lambda d, s: (*_logits(d, s), s.vocabulary)),
    Workload(
        vocab_cross_entropy_gradient,
        "",
        lambda d, s: (*_logits(d, s), *_losses(d, s), s.vocabulary, 1.0, 0.0, False),
    ),
    Workload(grouped_matmul, "", _grouped, lambda s: 4.0 * s.tokens * s.width**2),
    Workload(permute, "", lambda d, s: (d.normal(s.tokens, s.width), _order(d, s), 2)),
    Workload(
        unpermute,
        "",
        lambda d, s: (d.normal(2 * s.tokens, s.width), _order(d, s), d.normal(s.tokens, 2)),
    ),
    Workload(
        causal_conv,
        "",
        lambda d, s: (_stream(d, s), d.normal(s.width, 4), d.normal(s.width), None, None),
    ),
    Workload(causal_conv, "decode, 16 sequences", _conv_decode),
    Workload(ssd_scan, "", _ssd),
    Workload(ssd_scan, "decode, 16 sequences", _ssd_decode),
    Workload(gated_delta_rule, "", _delta_rule),
    *LOW_PRECISION_WORKLOADS,
)
"""What `megatron-kernels bench` measures."""
