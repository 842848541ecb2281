"""Tests of the Triton kernels of attention in Triton's interpreter; `test_triton.py` runs them.

Tiles are of 16 tokens, so that short sequences have several with and without a mask.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from megatron_kernels import Mask, Scores, attention, attention_backward, attention_forward
from megatron_kernels.inputs import CaseDropout
from megatron_kernels.ops.attention.scores import PLAIN_SCORES
from megatron_kernels.triton_kernels import attention as forward_kernels
from megatron_kernels.triton_kernels import attention_backward as backward_kernels
from megatron_kernels.triton_kernels import attention_parts
from megatron_kernels.triton_kernels.attention_launch import Tiling
from torch import Tensor

pytestmark = pytest.mark.sampled(4)

F64 = torch.float64
QUERIES, KEYS, BATCH, HEADS = 41, 41, 2, 2


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)

    def small(*_: Any) -> Tiling:
        return Tiling(16, 16, 4, 1)

    for module in (forward_kernels, backward_kernels):
        monkeypatch.setattr(module, "tiling", small)


def inputs(
    queries: int = QUERIES, keys: int = KEYS, groups: int = 1, width: int = 16, of_values: int = 16
) -> tuple[Tensor, ...]:
    shapes = (
        (queries, BATCH, HEADS, width),
        (keys, BATCH, groups, width),
        (keys, BATCH, groups, of_values),
    )
    return tuple(torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)


def dropout(queries: int = QUERIES, keys: int = KEYS) -> CaseDropout:
    words = torch.randint(-(2**31), 2**31, (2, queries, BATCH), dtype=torch.int64).int()
    return CaseDropout(words[0], words[1], torch.randint(1000, (BATCH, keys)))


def equal(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def packed(*lengths: tuple[int, ...]) -> Tensor:
    """Returns document ids of rows; a negative length is padding."""
    rows = [
        torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(row)])
        for row in lengths
    ]
    return torch.stack(rows).int()


DOCUMENTS = packed((18, 3, 20), (1, 20, -8, 12))
SHUFFLED = DOCUMENTS[:, torch.randperm(KEYS, generator=torch.Generator().manual_seed(1))]
POSITIONS = torch.stack((torch.arange(KEYS).flip(0), torch.arange(KEYS) * 2)).int()
MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "window": Mask(window=18),
    "narrow window": Mask(window=3),
    "window both ways": Mask(causal=False, window=17),
    "chunks": Mask(chunk=18),
    "chunks both ways": Mask(causal=False, chunk=10),
    "prefix": Mask(prefix=20),
    "prefixes and window": Mask(prefix=torch.tensor([5, 33]), window=20),
    "documents": Mask(DOCUMENTS),
    "documents both ways": Mask(DOCUMENTS, causal=False, window=8),
    "documents in any order": Mask(SHUFFLED, prefix=10),
    "positions": Mask(positions=POSITIONS),
    "positions, window": Mask(DOCUMENTS, positions=POSITIONS, window=9, chunk=30),
    "dense": Mask(dense=Mask(SHUFFLED, window=30).allowed(QUERIES, KEYS)),
    "prepared": Mask(SHUFFLED, window=30).prepare(QUERIES, KEYS),
}


OTHER_RULES: tuple[dict[str, Any], ...] = ({}, {"chunk": 16}, {"causal": False})
FAST = {
    ("causal", True),
    ("window both ways", False),
    ("prefixes and window", True),
    ("documents in any order", False),
    ("positions, window", True),
    ("dense", True),
}
CALLS = [
    pytest.param(
        name,
        drops,
        id=f"{name}, dropout" if drops else name,
        marks=() if (name, drops) in FAST else pytest.mark.slow,
    )
    for name in MASKS
    for drops in (False, True)
]


@pytest.mark.parametrize(("name", "drops"), CALLS)
def test_tiles_of_any_mask_equal_the_reference(name: str, drops: bool) -> None:
    q, k, v = inputs()
    drop = dropout() if drops else None
    both_equal(q, k, v, MASKS[name], PLAIN_SCORES, 0, drop)


def both_equal(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, offset: int, drop: Any
) -> None:
    """Compares out, lse and gradients of the block pair with those of the reference."""
    rest = mask, scores, offset, drop
    out, lse = attention_forward(q, k, v, *rest, backend="triton")
    truth, of_truth = attention_forward(q, k, v, *rest, backend="reference")
    equal(out, truth)
    equal(lse, of_truth)
    dout = torch.randn_like(out)
    found, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, truth))
    for got, want in zip(found, expected, strict=True):
        equal(got, want)
    more = torch.logaddexp(lse, torch.randn_like(lse))  # of keys in other blocks
    given = (dout, *(x.detach() for x in (q, k, v)), out.detach(), more, *rest)
    ours, theirs = (attention_backward(*given, backend=name) for name in ("triton", "reference"))
    for got, want in zip(ours, theirs, strict=True):
        equal(got, want)


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "scores",
    [
        pytest.param(Scores(0.7, softcap=0.8), marks=pytest.mark.slow),
        pytest.param(Scores(slopes=torch.tensor([0.5, 0.25], dtype=F64)), marks=pytest.mark.slow),
        Scores(softcap=2.0, slopes=torch.tensor([0.5, 0.25])),
    ],
    ids=["softcap", "slopes", "both"],
)
def test_other_scores_and_groups(scores: Scores, groups: int) -> None:
    q, k, v = inputs(groups=groups)
    both_equal(q, k, v, Mask(), scores, 0, dropout())
    both_equal(q, k, v, MASKS["positions, window"], scores, 0, None)


@pytest.mark.parametrize(
    ("width", "of_values"), [(5, 40), pytest.param(24, 16, marks=pytest.mark.slow)]
)
def test_heads_of_any_width(width: int, of_values: int) -> None:
    q, k, v = inputs(queries=20, keys=20, width=width, of_values=of_values)
    both_equal(q, k, v, Mask(), PLAIN_SCORES, 0, dropout(20, 20))


@pytest.mark.parametrize(
    "rules",
    [{"window": 18}, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_RULES)],
    ids=str,
)
def test_new_queries_over_a_cache_with_unused_room(rules: dict[str, Any]) -> None:
    q, k, v = inputs(queries=18, keys=52)
    both_equal(q, k, v, Mask(**rules), PLAIN_SCORES, 30, dropout(18, 52))
    both_equal(q, k, v, Mask(packed((25, 27), (52,)), **rules), PLAIN_SCORES, 30, None)


def test_sinks_take_part_and_get_a_gradient() -> None:
    sinks = torch.randn(HEADS, dtype=F64, requires_grad=True)
    given = (*inputs(), sinks)
    for mask in (Mask(), Mask(DOCUMENTS)):
        results = [
            attention(*given[:3], mask, Scores(sinks=sinks), dropout=dropout(), backend=name)
            for name in ("triton", "reference")
            if torch.manual_seed(3)
        ]
        equal(*results)
        dout = torch.randn_like(results[0])
        found, expected = (torch.autograd.grad(x, given, dout) for x in results)
        for got, want in zip(found, expected, strict=True):
            equal(got, want)


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
