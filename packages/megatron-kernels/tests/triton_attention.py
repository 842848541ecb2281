"""Masks and options of the Triton kernels of attention, in Triton's interpreter.

`test_triton_attention.py` runs these tests. Tiles are of 16 tokens, so that short sequences have
several with and without a mask.
"""

from typing import Any

import pytest
import torch
from attention_tiles import (
    DOCUMENTS,
    F64,
    HEADS,
    MASKS,
    dropout,
    equal,
    inputs,
    packed,
    use_small_tiles,
)
from megatron_kernels import Mask, Scores, attention, attention_backward, attention_forward
from megatron_kernels.ops.attention.scores import PLAIN_SCORES
from torch import Tensor

pytestmark = pytest.mark.sampled(4)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


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
