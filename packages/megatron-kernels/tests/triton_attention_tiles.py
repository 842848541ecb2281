"""Which tokens the Triton kernels of attention read, keep and save, in Triton's interpreter.

`test_triton_attention.py` runs these tests. Tiles are of 16 tokens.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from attention_tiles import (
    BATCH,
    F64,
    HEADS,
    KEYS,
    MASKS,
    QUERIES,
    dropout,
    equal,
    inputs,
    packed,
    use_small_tiles,
)
from megatron_kernels import Mask, Scores, attention
from megatron_kernels.inputs import CaseDropout
from megatron_kernels.ops.attention.scores import PLAIN_SCORES
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite, hashes
from megatron_kernels.triton_kernels import attention as forward_kernels
from megatron_kernels.triton_kernels import attention_parts
from torch import Tensor

pytestmark = pytest.mark.sampled(4)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        "documents",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("window", "positions, window")),
    ],
)
def test_tiles_out_of_reach_are_not_read(name: str) -> None:
    """Values that no query of a tile may see are NaN there, which a product would spread."""
    q, k, v = (x.detach() for x in inputs())
    mask = MASKS[name]
    allowed = mask.allowed(QUERIES, KEYS).expand(BATCH, -1, -1)
    checked = 0
    for start in range(0, QUERIES, 16):
        rows = slice(start, start + 16)
        for sample in range(BATCH):
            seen = allowed[sample, rows].any(0).nonzero().flatten()
            if not len(seen):
                continue
            low, high = int(seen[0]) // 16 * 16, -(-(int(seen[-1]) + 1) // 16) * 16
            spoilt = v.clone()
            spoilt[:low], spoilt[high:] = math.nan, math.nan
            checked += low + max(0, KEYS - high)
            out = attention(q, k, spoilt, mask, backend="triton")
            assert out[rows, sample].isfinite().all()
    assert checked > KEYS


BACKENDS = ("triton", "reference")
FEW = 20  # a whole tile and a part of one
RULES = (
    Mask(prefix=18),
    Mask(prefix=torch.tensor([11]), window=7),
    Mask(causal=False, chunk=9),
    Mask(packed((7, -2, 11)), chunk=6),
)


def followed_by_nan() -> Tensor:
    """Returns a leaf of one head whose memory goes on with tokens that are no numbers."""
    memory = torch.full((32, 1, 1, 16), math.nan, dtype=F64)
    memory[:FEW] = torch.randn(FEW, 1, 1, 16, dtype=F64)
    return memory[:FEW].requires_grad_()


def test_rules_of_a_mask_on_few_tokens_and_none_after_the_last_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_parts, "SCANNED", tl.constexpr(8))  # ids that are read at once
    for number, mask in enumerate(RULES):
        given, dout = [followed_by_nan() for _ in range(3)], followed_by_nan().detach()
        words = dropout(FEW, FEW)
        drop = CaseDropout(words.word0[:, :1], words.word1[:, :1]) if number == 0 else None
        results = []
        for name in ("triton", "reference"):
            out = attention(*given, mask, dropout=drop, backend=name)
            results.append((out.detach(), *torch.autograd.grad(out, given, dout)))
        for got, want in zip(*results, strict=True):
            equal(got, want)


def test_tiles_out_of_reach_are_read_in_neither_pass() -> None:
    """A tile that may not attend to the other one: NaN there reaches no output and no gradient."""
    first, second = slice(0, 16), slice(16, 32)
    for mask, queries, keys in (
        (Mask(window=1), second, first),
        (Mask(causal=False, window=1), first, second),
        (Mask(causal=False, chunk=16), second, first),
        (Mask(prefix=9), first, second),
    ):
        clean = [torch.randn(32, 1, 1, 16, dtype=F64) for _ in range(4)]
        for of_keys in (True, False):
            q, k, v, dout = (x.clone() for x in clean)
            for x in (k, v) if of_keys else (q, dout):
                x[keys if of_keys else queries] = math.nan
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, mask, backend="triton")
            wanted = leaves[:1] if of_keys else leaves[1:]
            found = torch.autograd.grad(out, wanted, dout)
            rows = [out, *found] if of_keys else list(found)
            assert all(x[queries if of_keys else keys].isfinite().all() for x in rows), mask


def test_the_bits_of_dropout_are_exactly_those_of_the_hash() -> None:
    """With one-hot values and equal scores, the output shows which keys a query keeps."""
    for columns in (True, False):
        check_bits(dropout() if columns else replace(dropout(), columns=None))


def check_bits(drop: CaseDropout) -> None:
    q = torch.zeros(QUERIES, BATCH, HEADS, 16)
    v = torch.eye(KEYS)[:, None, None].expand(-1, BATCH, HEADS, -1)
    k = torch.zeros(KEYS, BATCH, HEADS, 16)
    out = attention(q, k, v, Mask(causal=False), dropout=drop, backend="triton")
    every = slice(0, HEADS), slice(0, QUERIES), slice(0, KEYS)
    kept = drop.kept(slice(0, BATCH), every[0], KEYS)(*every[1:]) != 0
    assert torch.equal(out.permute(1, 2, 0, 3) > 0, kept)
    assert 0.7 < kept.float().mean() < 0.8


class Least(CaseDropout):
    """Keeps the hash of one key of the only query, and all that are larger."""

    @property
    def site(self) -> DropoutSite:
        number = torch.tensor(self.first_head * self.length + 2)
        return DropoutSite(
            5, 7, int(hashes(number, torch.tensor(3 + 5), torch.tensor(-9 ^ 7))), 2.0
        )


def test_dropout_keeps_the_least_hash_of_any_head() -> None:
    words = torch.tensor([[[3]], [[-9]]], dtype=torch.int32)
    for first_head in (0, 3_000_000):  # of which the channels are beyond signed numbers of 32 bits
        check_least(Least(*words, first_head=first_head))


def check_least(drop: CaseDropout) -> None:
    q, v = torch.zeros(1, 1, 1, 16), torch.eye(16)[:, None, None]
    out = attention(q, torch.zeros_like(v), v, Mask(causal=False), dropout=drop, backend="triton")
    kept = drop.kept(slice(0, 1), slice(0, 1), 16)(slice(0, 1), slice(0, 16))
    assert torch.equal(out[0, 0, 0] > 0, kept[0, 0, 0] > 0) and kept[..., 2] and not kept.all()


def test_rules_of_one_sample_are_those_of_all() -> None:
    rules = Mask(packed((11, 9)), positions=torch.arange(FEW).flip(0)[None].int(), window=7)
    for mask in (rules, Mask(dense=rules.allowed(FEW, FEW))):
        check_one_sample(mask)


def check_one_sample(mask: Mask) -> None:
    q, k, v = inputs(FEW, FEW)
    drop = replace(dropout(FEW, FEW), columns=torch.arange(FEW)[None] * 3)
    results = [attention(q, k, v, mask, dropout=drop, backend=name) for name in BACKENDS]
    equal(*results)
    dout = torch.randn_like(results[0])
    found, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in results)
    for got, want in zip(found, expected, strict=True):
        equal(got, want)


@pytest.mark.parametrize("make", [lambda x: x.half(), lambda x: x.float()], ids=["half", "float"])
def test_fewer_bits(make: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (make(x.detach()).requires_grad_() for x in inputs())
    drop = dropout()
    out = attention(q, k, v, Mask(), dropout=drop, backend="triton")
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = attention(*wide, Mask(), dropout=drop, backend="reference")
    dout = make(torch.randn(out.shape))
    tolerance = 4e-3 if out.dtype == torch.float16 else 2e-6
    pairs = [(out, truth)]
    pairs += zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(truth, wide, dout.double()),
        strict=True,
    )
    for got, want in pairs:
        assert float((got - want).abs().max()) < tolerance * max(1.0, float(want.abs().max()))


def test_views_with_any_strides_are_not_copied() -> None:
    """Heads of a fused projection, whose tokens are far apart."""
    fused = torch.randn(QUERIES, BATCH, HEADS, 3, 16, dtype=F64, requires_grad=True)
    q, k, v = fused.unbind(3)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = attention(q, k, v, Mask(), backend="triton")
    addresses = {x.data_ptr() for x in saved}
    assert {x.data_ptr() for x in (q, k, v)} <= addresses
    dout = torch.randn_like(out)
    truth = attention(q, k, v, Mask(), backend="reference")
    equal(*(torch.autograd.grad(x, fused, dout)[0] for x in (out, truth)))


def test_packed_documents_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = Mask(packed((20, 20), (40,))).prepare(40, 40)
    assert mask.runs == ((20, 20), (40,))
    q, k, v = (x.detach() for x in inputs(40, 40))
    calls, true = [], forward_kernels.tiling
    monkeypatch.setattr(
        forward_kernels, "tiling", lambda *given: calls.append(given[1].shape) or true(*given)
    )
    out = attention(q, k, v, mask, backend="triton")
    assert calls == [q.shape]
    equal(out, attention(q, k, v, mask, backend="reference"))


def test_what_the_kernels_do_not_support_is_a_reason() -> None:
    q, k, v = inputs()
    reasons = {
        "does not support a bias": (
            q, k, v, Mask(), Scores(bias=torch.zeros(1, HEADS, QUERIES, KEYS))
        ),
        "gives slopes no gradient": (
            q, k, v, Mask(), Scores(slopes=torch.zeros(HEADS, requires_grad=True))
        ),
        "not a hash": (q, k, v, Mask(), PLAIN_SCORES, 0, lambda p: p),
        "wider than 256": (*inputs(width=272), Mask()),
        "must agree": (q, k.float(), v, Mask()),
    }  # fmt: skip
    for reason, arguments in reasons.items():
        assert reason in attention.explain(*arguments, backend="triton").reason
