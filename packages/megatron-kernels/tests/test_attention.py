"""Attention: independent references, rows without keys, caches, and the block pair."""

import math
from functools import partial

import pytest
import torch
from megatron_kernels import (
    KernelError,
    Mask,
    Scores,
    attention,
    attention_backward,
    attention_forward,
)
from torch import Tensor

F64 = torch.float64
BACKENDS = ("torch", "reference")
PADDED = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 2, 2, 2]], dtype=torch.int32)


def inputs(s: int = 7, t: int = 7, n: int = 4, g: int = 2, d: int = 6) -> tuple[Tensor, ...]:
    shapes = ((s, 2, n, d), (t, 2, g, d), (t, 2, g, d))
    return tuple(torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    offset: int = 0,
    factors: Tensor | None = None,
) -> Tensor:
    """Returns attention computed query by query; ``factors`` [b, n, s, t] multiply the weights."""
    s, b, n, _ = q.shape
    out = torch.zeros(s, b, n, v.shape[-1], dtype=F64)
    allowed = mask.allowed(s, k.shape[0], offset).expand(b, -1, -1)
    for row in range(s):
        for sample in range(b):
            for head in range(n):
                group = head // (n // k.shape[2])
                seen = [key for key in range(k.shape[0]) if allowed[sample, row, key]]
                powers = [
                    math.exp(scale * float(q[row, sample, head] @ k[key, sample, group]))
                    for key in seen
                ]
                for key, power in zip(seen, powers, strict=True):
                    factor = 1.0 if factors is None else float(factors[sample, head, row, key])
                    weight = factor * power / sum(powers)
                    out[row, sample, head] += weight * v[key, sample, group].detach()
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(document_ids=PADDED, window=2)])
def test_equal_to_arithmetic_by_hand(mask: Mask, backend: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    expected = by_hand(q, k, v, mask, 0.3)
    torch.testing.assert_close(attention(q, k, v, mask, Scores(0.3), backend=backend), expected)


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dropout_multiplies_the_weights_of_every_head_and_is_differentiated(fast: bool) -> None:
    """``fast`` compares one random direction of the derivative, not all, as gradcheck does."""
    q, k, v = inputs()
    factors = torch.rand(2, 4, 7, 7, dtype=F64).round() * 1.25

    def dropout(p: Tensor) -> Tensor:
        assert p.shape == factors.shape
        torch.testing.assert_close(p[:, :, 2:].sum(-1), torch.ones(2, 4, 5, dtype=F64))
        return p * factors

    mask = Mask(window=5)
    out = attention(q, k, v, mask, Scores(0.3), dropout=dropout)
    expected = by_hand(*(x.detach() for x in (q, k, v)), mask, 0.3, factors=factors)
    torch.testing.assert_close(out.detach(), expected)
    assert torch.autograd.gradcheck(
        lambda *tensors: attention(*tensors, mask, dropout=lambda p: p * factors),
        (q, k, v),
        fast_mode=fast,
    )


def test_only_the_reference_supports_dropout() -> None:
    q, k, v = inputs()
    choice = attention.explain(q, k, v, Mask(), dropout=torch.zeros_like)
    assert choice.backend == "reference"
    assert "torch: it supports only its own dropout" in choice.reason
    assert attention.explain(q, k, v, Mask()).backend == "torch"
    assert not attention(q, k, v, Mask(), dropout=torch.zeros_like).any()
    with pytest.raises(
        KernelError, match="attention cannot use backend torch: it supports only its own dropout"
    ):
        attention(q, k, v, Mask(), dropout=torch.zeros_like, backend="torch")


def test_a_sink_takes_part_in_the_softmax_without_a_value() -> None:
    """The reference has one more key, with the sink's logits as scores and a value of zero."""
    q, k, v = (torch.randn(5, 2, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    found = attention(q, k, v, Mask(), Scores(0.3, sinks=sinks))
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = 0.3 * torch.einsum("sbnd,tbnd->bnst", q, keys)
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    column = sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)
    p = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    torch.testing.assert_close(found, torch.einsum("bnst,tbnd->sbnd", p, values))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], Mask(), Scores(sinks=x[3])), leaves, fast_mode=True
    )


def test_a_zero_sink_is_softmax_off_by_one_and_a_low_sink_has_no_effect() -> None:
    q, k, v = (torch.randn(3, 1, 1, 4, dtype=torch.float64) for _ in range(3))
    first = attention(q, k, v, Mask(), Scores(1.0, sinks=torch.zeros(1, dtype=F64)))[0, 0, 0]
    share = torch.exp((q[0] * k[0]).sum())
    torch.testing.assert_close(first, v[0, 0, 0] * share / (1 + share))
    low = torch.full((1,), -1e4, dtype=torch.float64)
    torch.testing.assert_close(
        attention(q, k, v, Mask(), Scores(sinks=low)), attention(q, k, v, Mask())
    )


def test_only_the_reference_supports_sinks() -> None:
    q = k = v = torch.randn(3, 1, 2, 4)
    choice = attention.explain(q, k, v, Mask(), Scores(sinks=torch.zeros(2)))
    assert choice.backend == "reference" and "torch: it does not support sinks" in choice.reason


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_softcap_bounds_the_scores_before_the_mask(fast: bool) -> None:
    """The reference is Gemma 2's formula, `softcap * tanh(x / softcap)`."""
    q, k, v = (torch.randn(5, 2, heads, 4, dtype=F64) for heads in (4, 2, 2))
    found = attention(q, k, v, Mask(), Scores(1.5, softcap=0.8))
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = 0.8 * torch.tanh(1.5 * torch.einsum("sbnd,tbnd->bnst", q, keys) / 0.8)
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(found, torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), values))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, Mask(window=3), Scores(softcap=0.8)), leaves, fast_mode=fast
    )


def test_a_zero_or_high_softcap_has_no_effect_and_a_negative_one_is_refused() -> None:
    q, k, v = inputs()
    plain = attention(q, k, v, Mask())
    torch.testing.assert_close(
        attention(q, k, v, Mask(), Scores(softcap=0.0)), plain, rtol=0, atol=0
    )
    torch.testing.assert_close(attention(q, k, v, Mask(), Scores(softcap=1e6)), plain)
    for softcap in (-1.0, float("nan")):
        with pytest.raises(KernelError, match=f"softcap is {softcap}; it must be 0"):
            attention(q, k, v, Mask(), Scores(softcap=softcap))


def test_backends_without_softcap_report_it() -> None:
    q = k = v = torch.randn(3, 1, 2, 4)
    choice = attention.explain(q, k, v, Mask(), Scores(softcap=2.0))
    assert choice.backend == "reference" and "torch: it does not support softcap" in choice.reason


def test_slopes_subtract_the_distance_in_positions() -> None:
    """The reference adds `-slope * (i - j)` to the scores, by the positions of the mask."""
    q, k, v = (torch.randn(5, 2, heads, 4, dtype=F64) for heads in (4, 2, 2))
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.0], dtype=F64)
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    for positions in (torch.arange(5), torch.tensor([2, 0, 7, 4, 3])):
        mask = Mask(positions=positions.int().expand(2, 5))
        distance = positions[:, None] - positions[None]
        scores = 0.5 * torch.einsum("sbnd,tbnd->bnst", q, keys) - slopes.view(4, 1, 1) * distance
        p = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        found = attention(q, k, v, mask.prepare(5, 5), Scores(slopes=slopes))
        torch.testing.assert_close(found, torch.einsum("bnst,tbnd->sbnd", p, values))
    choice = attention.explain(q, k, v, Mask(), Scores(slopes=slopes))
    assert "torch: it does not support slopes" in choice.reason


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(document_ids=PADDED, window=3)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_bias_is_added_to_the_scores_and_gets_a_gradient(
    mask: Mask, backend: str, batch: int
) -> None:
    q, k, v = inputs()
    bias = torch.randn(batch, 4, 7, 7, dtype=F64, requires_grad=True)
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    products = 0.3 * torch.einsum("sbnd,tbnd->bnst", q, keys) + bias
    allowed = mask.allowed(7, 7)[:, None]
    p = products.masked_fill(~allowed, -torch.inf).softmax(-1)
    p = torch.where(allowed.any(-1, keepdim=True), p, 0.0)
    expected = torch.einsum("bnst,tbnd->sbnd", p, values)
    found = attention(q, k, v, mask, Scores(0.3, bias=bias), backend=backend)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v, bias))
    ours = torch.autograd.grad((found * weights).sum(), (q, k, v, bias))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_bias_follows_new_queries_and_room_in_a_cache() -> None:
    q, k, v = (x.detach() for x in inputs())
    bias = torch.randn(1, 4, 7, 7, dtype=F64)
    whole = attention(q, k, v, Mask(), Scores(bias=bias))
    for backend in BACKENDS:
        new = attention(
            q[3:5], k, v, Mask(), Scores(bias=bias[:, :, 3:5]), query_offset=3, backend=backend
        )
        torch.testing.assert_close(new, whole[3:5])


def test_flash_attn_reports_that_it_has_no_bias_and_other_shapes_are_refused() -> None:
    q, k, v = (x.detach() for x in inputs())
    choice = attention.explain(q, k, v, Mask(), Scores(bias=torch.zeros(1, 4, 7, 7)))
    assert choice.backend == "torch" and "flash_attn: it does not support a bias" in choice.reason
    for shape in ((1, 2, 7, 7), (3, 4, 7, 7), (1, 4, 7, 6)):
        with pytest.raises(
            KernelError, match=r"bias has shape .*; these scores need \[2, 4, 7, 7\]"
        ):
            attention(q, k, v, Mask(), Scores(bias=torch.zeros(shape)))
    assert Scores(bias=torch.zeros(1, 4, 7, 7)).of_heads(1, 2).bias.shape == (1, 2, 7, 7)


def test_slopes_and_sinks_of_other_heads_are_refused_and_blocks_refuse_sinks() -> None:
    q, k, v = inputs()
    with pytest.raises(KernelError, match=r"slopes have shape \[2\]; 4 heads need \[4\]"):
        attention(q, k, v, Mask(), Scores(slopes=torch.zeros(2)))
    scores = Scores(sinks=torch.zeros(4))
    with pytest.raises(KernelError, match="sinks, which would count in every block"):
        attention_forward(q, k, v, Mask(), scores)
    attention_forward(q, k, v, Mask(), scores.without_sinks())
    assert scores.of_heads(1, 2).sinks is not None and len(scores.of_heads(1, 2).sinks) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_scale_is_one_over_the_root_of_the_head_dimension(backend: str) -> None:
    q, k, v = inputs()
    default = attention(q, k, v, Mask(), backend=backend)
    torch.testing.assert_close(
        default, attention(q, k, v, Mask(), Scores(6**-0.5), backend=backend)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gives_zeros_and_no_nan_in_any_gradient(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs())
    out = attention(q, k, v, Mask(document_ids=PADDED), backend=backend)
    out.sum().backward()
    assert torch.equal(out[5:, 0], torch.zeros_like(out[5:, 0]))
    assert not out[:5].eq(0).all()
    for x in (q, k, v):
        assert x.grad is not None and torch.isfinite(x.grad).all()
        assert torch.equal(x.grad[5:, 0], torch.zeros_like(x.grad[5:, 0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [{}, {"window": 3}, {"chunk": 3}], ids=str)
@pytest.mark.parametrize("steps", [[7], [3, 4], [1] * 7, [4, 1, 1, 1]], ids=str)
def test_attention_step_by_step_with_a_cache_equals_one_pass(
    steps: list[int], rule: dict[str, int], backend: str
) -> None:
    q, k, v = (x.detach() for x in inputs())
    whole = attention(q, k, v, Mask(**rule), backend=backend)
    room = torch.full((3, 2, 2, 6), math.nan, dtype=F64)  # unused room of the cache is never read
    cache_k, cache_v = torch.cat((k, room)), torch.cat((v, room))
    at, parts = 0, []
    for step in steps:
        now = slice(at, at + step)
        # The reference multiplies unused keys by zero, which keeps NaN, so it gets only used keys.
        end = at + step if backend == "reference" else None
        mask = Mask(**rule)
        keys, values = cache_k[:end], cache_v[:end]
        parts.append(attention(q[now], keys, values, mask, query_offset=at, backend=backend))
        at += step
    torch.testing.assert_close(torch.cat(parts), whole)


def test_inputs_are_passed_to_the_fused_kernel_without_a_copy() -> None:
    q, k, v = inputs()
    saved: set[int] = set()

    def note(x: Tensor) -> Tensor:
        saved.add(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attention(q, k, v, Mask())
    assert {x.data_ptr() for x in (q, k, v)} <= saved


def test_heads_that_do_not_divide_over_groups_are_an_error() -> None:
    q, k, v = inputs(n=4, g=3)
    with pytest.raises(KernelError, match="4 heads do not divide over 3 query groups"):
        attention(q, k, v, Mask())


MASKS = [
    Mask(),
    Mask(causal=False),
    Mask(window=3),
    Mask(chunk=3),
    Mask(prefix=4),
    Mask(document_ids=PADDED),
]


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_the_block_backward_equals_autograd(mask: Mask, dropped: bool, softcap: float) -> None:
    q, k, v = inputs()
    scores = Scores(
        softcap=softcap, slopes=torch.tensor([0.5, 0.0, 0.25, 1.0]) if softcap else None
    )
    kept = torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(3)) > 0.3
    dropout = partial(torch.mul, kept / 0.7) if dropped else None
    out, lse = attention_forward(q, k, v, mask, scores, dropout=dropout)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        ours = attention_backward(dout, q, k, v, out, lse, mask, scores, dropout=dropout)
    for got, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lse_and_the_results_of_the_block_backward_have_no_gradient(backend: str) -> None:
    q, k, v = inputs()
    out, lse = attention_forward(q, k, v, Mask(), backend=backend)
    assert out.requires_grad and not lse.requires_grad
    found = attention_backward(out, q, k, v, out, lse, Mask(), backend=backend)
    assert not any(each.requires_grad for each in found)


def test_lse_is_the_log_of_the_sum_of_exponentials_of_the_scores() -> None:
    q, k, v = (x.detach() for x in inputs(n=2))
    _, lse = attention_forward(q, k, v, Mask(document_ids=PADDED), Scores(0.5))
    scores = torch.einsum("sbnd,tbnd->sbnt", q, k) * 0.5
    allowed = Mask(document_ids=PADDED).allowed(7, 7).transpose(0, 1)[:, :, None]
    expected = scores.masked_fill(~allowed, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    assert torch.isneginf(lse[5:, 0]).all()


@pytest.mark.parametrize("documents", [False, True])
def test_blocks_of_keys_and_queries_combine_to_one_pass(documents: bool) -> None:
    """Ring attention in one process: zig-zag halves of queries and keys, both passes."""
    q, k, v = inputs(s=8, t=8)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 2, 2]], dtype=torch.int32)
    positions = torch.arange(8, dtype=torch.int32).expand(2, 8)
    whole = Mask(document_ids=ids if documents else None)
    out, lse = attention_forward(q, k, v, whole)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), dout)
    halves = (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5]))

    def block(queries: Tensor, keys: Tensor) -> Mask:
        own = (ids[:, queries], ids[:, keys]) if documents else (None, None)
        return Mask(own[1], positions[:, keys], query_document_ids=own[0],
                    query_positions=positions[:, queries])  # fmt: skip

    grads = [torch.zeros_like(x) for x in (q, k, v)]
    with torch.no_grad():
        for queries in halves:
            passes = [
                attention_forward(q[queries], k[at], v[at], block(queries, at)) for at in halves
            ]
            total = torch.logaddexp(passes[0][1], passes[1][1])
            safe = torch.where(torch.isneginf(total), 0, total)
            combined = sum(o * torch.exp(part - safe)[..., None] for o, part in passes)
            torch.testing.assert_close(combined, out[queries])
            torch.testing.assert_close(total, lse[queries])
            for at in halves:
                dq, dk, dv = attention_backward(
                    dout[queries], q[queries], k[at], v[at], combined, total, block(queries, at)
                )
                grads[0][queries] += dq
                grads[1][at] += dk
                grads[2][at] += dv
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
