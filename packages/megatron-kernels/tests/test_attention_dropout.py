"""Attention dropout in tiles: the reference in float64, saved masks, blocks of a ring, bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from megatron_kernels import Mask, attention, attention_backward, attention_forward
from megatron_kernels.ops.attention import tiles
from megatron_kernels.ops.attention.mask_bits import MaskBits
from torch import Tensor

F64 = torch.float64
PACKED = torch.tensor([[0] * 9 + [-1] * 4, [5] * 3 + [2] * 8 + [-1] * 2], dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class DrawnDropout:
    """Dropout of drawn elements `[b, n, s, t]`, also of parts of them."""

    drops: Tensor
    probability: float = 0.25

    def __call__(self, p: Tensor) -> Tensor:
        return p.masked_fill(self.drops, 0) / (1 - self.probability)

    def kept(self, samples: slice, heads: slice, length: int) -> Callable[[slice, slice], Tensor]:
        drops = self.drops[samples, heads]
        return lambda queries, keys: 1 - drops[..., queries, keys].int()


def inputs(s: int, g: int, n: int = 6, d: int = 6) -> tuple[Tensor, ...]:
    shapes = ((s, 2, n, d), (s, 2, g, d), (s, 2, g, d))
    return tuple(torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)


def drawn(s: int, n: int = 6) -> DrawnDropout:
    return DrawnDropout(torch.rand(2, n, s, s, generator=torch.Generator().manual_seed(5)) < 0.25)


def compare(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: DrawnDropout) -> None:
    """Compares tiles with the reference, in float64."""
    assert attention.explain(q, k, v, mask, dropout=dropout).backend == "tiles"
    out = attention(q, k, v, mask, dropout=dropout)
    truth = attention(q, k, v, mask, dropout=dropout, backend="reference")
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    found, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, truth))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("elements", [1, 100, 600, 2**17])
@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=False), Mask(window=5), Mask(PACKED)], ids=str
)
def test_tiles_equal_the_reference(
    mask: Mask, elements: int, rows: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one group, of some groups and of several samples, with part of the rows."""
    monkeypatch.setattr(tiles, "SHORT", 0)
    monkeypatch.setattr(tiles, "_ROWS", rows)
    monkeypatch.setattr(tiles, "_ELEMENTS", elements)
    compare(*inputs(13, groups), mask, drawn(13))


@pytest.mark.parametrize("elements", [1, 64 * 77 * 2, 2**19])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False), Mask(window=50)], ids=str)
@pytest.mark.parametrize("groups", [6, 2])
def test_tiles_with_saved_masks_equal_the_reference(
    groups: int, mask: Mask, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """77 queries are tiles of 32 or 64 rows and a smaller one."""
    monkeypatch.setattr(tiles, "_ELEMENTS", elements)
    compare(*inputs(77, groups), mask, drawn(77))


@pytest.mark.parametrize(
    ("length", "groups", "short", "elements", "calls"),
    [
        # Groups of 3 heads have 39 scores in a row and 507 in a tile of all rows.
        (13, 2, 0, 1, 4 * 13),  # a row of each group of both samples
        (13, 2, 0, 100, 4 * 7),  # 2 rows
        (13, 2, 0, 600, 4),
        (13, 2, 0, 1100, 2),  # both groups of a sample
        (13, 2, 0, 2100, 1),  # both samples
        (13, 1, 0, 2 * 13 * 78 - 1, 2),
        (13, 1, 0, 2 * 13 * 78, 1),
        # 77 rows of one head: tiles of saved masks have a multiple of 32 rows, 64 at most.
        (77, 6, 512, 1, 12 * 3),
        (77, 6, 512, 63 * 77, 12 * 3),
        (77, 6, 512, 64 * 77, 12 * 2),
        (77, 6, 512, 3 * 64 * 77, 2 * 2 * 2),  # 3 of the 6 heads of a sample
        (77, 6, 512, 4 * 64 * 77, 2 * 2 * 2),  # as equal as possible
        (77, 6, 512, 2**19, 2),
    ],
)
def test_tiles_are_as_large_as_their_scores_may_be(
    length: int,
    groups: int,
    short: int,
    elements: int,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "SHORT", short)
    monkeypatch.setattr(tiles, "_ELEMENTS", elements)
    sizes, true = [], torch.softmax

    def noted(x: Tensor, dim: int) -> Tensor:
        sizes.append(x.numel())
        return true(x, dim)

    monkeypatch.setattr(torch, "softmax", noted)
    with torch.no_grad():
        attention(*inputs(length, groups), Mask(causal=False), dropout=drawn(length))
    assert len(sizes) == calls and sum(sizes) == 2 * 6 * length**2


@pytest.mark.parametrize("length", [512, 513])
def test_only_masks_of_short_sequences_are_saved(length: int) -> None:
    """Longer ones are computed again in the backward pass."""
    calls = []

    class Counted(DrawnDropout):
        def kept(self, *part: slice | int) -> Callable[[slice, slice], Tensor]:
            calls.append(part)
            return super().kept(*part)

    q, k, v = (x.float().detach().requires_grad_() for x in inputs(length, 1, n=1))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = attention(q, k, v, Mask(), dropout=Counted(drawn(length, 1).drops))
    forward = len(calls)
    out.sum().backward()
    assert forward > 0 and (len(calls) > forward) == (length > 512)
    words = [x for x in saved if x.dtype == torch.int32]
    bits = 2 * length * length if length <= 512 else 0
    assert 8 * sum(x.nbytes for x in words) == bits


def test_a_pass_without_gradient_saves_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*shape: int) -> MaskBits:
        raise AssertionError("a mask is saved")

    monkeypatch.setattr(MaskBits, "empty", refused)
    with torch.no_grad():
        attention(*inputs(13, 2), Mask(), dropout=drawn(13))


def test_bits_of_a_mask_are_those_that_were_written() -> None:
    kept = torch.randint(2, (3, 4, 77, 41), dtype=torch.int32)
    mask = MaskBits.empty(3, 4, 77, 41)
    for samples in (slice(0, 2), slice(2, 3)):
        for queries in (slice(0, 64), slice(64, 77)):
            part = kept[samples, :, queries].clone()
            mask.write(part, samples, slice(0, 4), queries)
    assert mask.words.shape == (3, 4, 3, 41)
    assert int(mask.words[1, 2, 2, 5]) == sum(int(kept[1, 2, 64 + i, 5]) << i for i in range(13))
    for queries in (slice(0, 77), slice(32, 64), slice(64, 77)):
        found = mask.read(slice(1, 3), slice(2, 4), queries, 40)
        assert torch.equal(found, kept[1:3, 2:4, queries, :40])


@pytest.mark.parametrize("mask", [Mask(), Mask(PACKED, window=6)], ids=str)
def test_blocks_of_a_ring_equal_the_whole(mask: Mask) -> None:
    """Some rows of a block may attend to none of its keys, and padding to no key at all."""
    q, k, v = (x.detach() for x in inputs(13, 2))
    dropout, dout = drawn(13), torch.randn(13, 2, 6, 6, dtype=F64)
    allowed = mask.allowed(13, 13).expand(2, -1, -1)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    truth = attention(*whole, mask, dropout=dropout, backend="reference")
    expected = torch.autograd.grad(truth, whole, dout)
    halves = slice(0, 7), slice(7, 13)
    blocks = [
        (at, Mask(causal=False, dense=allowed[:, :, at]), DrawnDropout(dropout.drops[..., at]))
        for at in halves
    ]
    passes = [
        attention_forward(q, k[at], v[at], own, dropout=drops, backend="tiles")
        for at, own, drops in blocks
    ]
    lse = torch.logaddexp(passes[0][1], passes[1][1])
    plain = attention_forward(q, k, v, mask, dropout=dropout, backend="reference")
    torch.testing.assert_close(lse, plain[1], rtol=1e-12, atol=1e-12)
    safe = torch.where(torch.isneginf(lse), 0, lse)
    out = sum(part * torch.exp(own - safe)[..., None] for part, own in passes)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    dq = torch.zeros_like(q)
    for at, own, drops in blocks:
        found = attention_backward(
            dout, q, k[at], v[at], out, lse, own, dropout=drops, backend="tiles"
        )
        dq += found[0]
        for got, want in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(got, want[at], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dq, expected[0], rtol=1e-12, atol=1e-12)


def test_products_in_bfloat16_are_as_exact_as_those_of_the_fused_kernel() -> None:
    """The truth is float64. The fused kernel has no dropout, so nothing is dropped."""
    dropout = DrawnDropout(torch.zeros(2, 2, 600, 600, dtype=torch.bool), 0.0)
    q, k, v, dout = (torch.randn(600, 2, 2, 64).bfloat16() for _ in range(4))

    def results(dtype: torch.dtype, dropped: bool, backend: str) -> list[Tensor]:
        given = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        drop = dropout if dropped else None
        out = attention(*given, Mask(), dropout=drop, backend=backend)
        return [x.double() for x in (out, *torch.autograd.grad(out, given, dout.to(dtype)))]

    truth = results(F64, False, "reference")
    tiled, fused = results(torch.bfloat16, True, "tiles"), results(torch.bfloat16, False, "torch")
    for own, theirs, exact in zip(tiled, fused, truth, strict=True):
        assert (own - exact).norm() < 1.25 * (theirs - exact).norm()
        assert (own - exact).norm() < 2**-8 * exact.norm()


@pytest.mark.parametrize(
    ("dtype", "wide", "narrow"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (F64, F64, F64),
    ],
    ids=str,
)
def test_products_of_values_and_gradients_are_in_bfloat16_for_bfloat16_alone(
    dtype: torch.dtype, wide: torch.dtype, narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and gradients of probabilities are in float32, as the module describes."""
    seen, product = [], torch.bmm

    def noted(x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype
        seen.append(x.dtype)
        return product(x, y)

    monkeypatch.setattr(torch, "bmm", noted)
    given = [x.detach().to(dtype).requires_grad_() for x in inputs(13, 2)]
    out = attention(*given, Mask(), dropout=drawn(13), backend="tiles")
    torch.autograd.grad(out, given, torch.ones_like(out))
    assert seen == [wide, narrow, wide, wide, narrow, narrow, narrow]


def test_blocks_without_tokens_or_heads_have_no_result_and_no_gradient() -> None:
    for shapes in (((0, 1, 2, 4), (3, 1, 1, 4)), ((3, 1, 2, 4), (0, 1, 1, 4)),
                   ((3, 0, 2, 4), (3, 0, 1, 4)), ((3, 1, 0, 4), (3, 1, 0, 4))):  # fmt: skip
        q, k = (torch.ones(shape, dtype=F64) for shape in shapes)
        mask = Mask(causal=False)
        drops = DrawnDropout(torch.zeros(q.shape[1], q.shape[2], len(q), len(k)).bool())
        out, lse = attention_forward(q, k, k, mask, dropout=drops, backend="tiles")
        assert out.shape == q.shape and not out.any() and torch.isneginf(lse).all()
        found = attention_backward(out, q, k, k, out, lse, mask, dropout=drops, backend="tiles")
        assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
        assert not any(x.any() for x in found)
