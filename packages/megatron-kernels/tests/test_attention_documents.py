"""Attention of packed documents: computed one by one, and as CUDA's kernels get them."""

from typing import Any

import pytest
import torch
from megatron_kernels import (
    Mask,
    Scores,
    attention,
)
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.sdpa import sdpa
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .test_attention import F64, inputs

BY_HEAD = torch.tensor([0.5, 0.0, 0.25, 1.0], dtype=F64)
PACKED = torch.tensor(
    [[3] * 16 + [4] * 16 + [1] * 16 + [-1] * 16, [7] * 5 + [-1] * 2 + [0] * 40 + [2] * 17],
    dtype=torch.int32,
)


@pytest.mark.parametrize(
    "scores",
    [Scores(), Scores(softcap=0.5), Scores(slopes=BY_HEAD), Scores(sinks=BY_HEAD)],
    ids=["plain", "softcap", "slopes", "sinks"],
)
@pytest.mark.parametrize("rules", [{}, {"causal": False}, {"window": 9}], ids=str)
def test_packed_documents_are_computed_one_by_one(rules: dict[str, Any], scores: Scores) -> None:
    """The truth is the reference with the mask as a tensor of all pairs."""
    q, k, v = inputs(s=64, t=64, g=2)
    mask = Mask(PACKED, **rules)
    prepared = mask.prepare(64, 64)
    assert prepared.runs == ((16, 16, 16, -16), (5, -2, 40, 17)) and prepared.dense is None
    out = attention(q, k, v, prepared, scores)
    truth = attention(q, k, v, mask, scores, backend="reference")
    assert torch.equal(out[48:, 0], torch.zeros_like(out[48:, 0]))
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    found, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, truth))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_dropout_and_biases_of_packed_documents_are_those_of_all_pairs() -> None:
    q, k, v = inputs(s=64, t=64, g=2)
    mask = Mask(PACKED).prepare(64, 64)
    assert mask.runs is not None
    kept = (torch.rand(2, 4, 64, 64, dtype=F64) > 0.25) / 0.75
    bias = torch.randn(1, 4, 64, 64, dtype=F64)
    for scores, dropout in ((Scores(bias=bias), None), (Scores(), kept.mul)):
        found = attention(q, k, v, mask, scores, dropout=dropout)
        expected = attention(q, k, v, Mask(PACKED), scores, dropout=dropout, backend="reference")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "biased", "groups"),
    [
        (torch.float32, False, 4),
        (torch.bfloat16, False, 2),
        (torch.float16, False, 2),
        (torch.bfloat16, True, 4),
    ],
)
def test_kernels_of_cuda_without_groups_get_keys_of_all_heads(
    dtype: torch.dtype, biased: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only flash attention has groups there; torch would leave the fused kernels."""
    seen = []

    def called(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.extend((k.shape[1], v.shape[1], options["enable_gqa"]))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(7, 2, 4, 8, dtype=dtype, device="cuda")
        k = torch.empty(7, 2, 2, 8, dtype=dtype, device="cuda")
        bias = torch.empty(1, 4, 7, 7, dtype=dtype, device="cuda") if biased else None
        sdpa(AttentionCall(q, k, k, Mask(causal=not biased), Scores(bias=bias)))
    assert seen == [groups, groups, groups == 2]


def test_fused_kernels_see_no_pair_of_two_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    true = torch.nn.functional.scaled_dot_product_attention

    def called(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        shapes.append((q.shape[0], q.shape[2], options["attn_mask"]))
        return true(q, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    q, k, v = inputs(s=64, t=64)
    attention(q, k, v, Mask(PACKED).prepare(64, 64))
    assert shapes == [(3, 16, None), (1, 5, None), (1, 40, None), (1, 17, None)]


@pytest.mark.parametrize(
    "mask",
    [
        Mask(PACKED, positions=torch.arange(64, dtype=torch.int32).expand(2, -1)),
        Mask(PACKED, chunk=10),
        Mask(PACKED, prefix=3),
        Mask(PACKED[:, :32].repeat(1, 2)),  # documents that come back
        Mask(torch.arange(64, dtype=torch.int32).expand(2, -1)),  # too many
    ],
    ids=["positions", "chunk", "prefix", "twice", "many"],
)
def test_other_documents_get_a_mask_of_all_pairs(mask: Mask) -> None:
    prepared = mask.prepare(64, 64)
    assert prepared.runs is None and prepared.dense is not None
    q, k, v = inputs(s=64, t=64)
    truth = attention(q, k, v, mask, backend="reference")
    torch.testing.assert_close(attention(q, k, v, prepared), truth)


def test_the_compiler_is_given_keys_in_the_order_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views of a fused projection would be copied for it."""
    seen: list[Tensor] = []
    true = torch.nn.functional.scaled_dot_product_attention

    def called(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen[:] = k, v
        return true(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", called)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    q, k, v = (x.detach() for x in inputs())
    fused = torch.randn(7, 2, 4, 3, 6, dtype=F64)
    for given, in_order in (
        ((q, k, v), True),
        (fused.unbind(3), False),
    ):
        expected = attention(*given, Mask(), backend="reference")
        found = attention(*given, Mask(), backend="torch")
        torch.testing.assert_close(found, expected)
        tokens = [x.transpose(1, 2) for x in seen]  # [b, t, g, d]
        assert [x.is_contiguous() for x in tokens] == [in_order] * 2


def test_documents_of_one_sequence_have_the_shape_of_a_batch_of_one() -> None:
    q, k, v = (x.detach()[:, :1] for x in inputs(s=64, t=64))
    prepared = Mask(PACKED[:1]).prepare(64, 64)
    assert prepared.runs is not None
    truth = attention(q, k, v, Mask(PACKED[:1]), backend="reference")
    torch.testing.assert_close(attention(q, k, v, prepared), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("backend", "in_one_call"),
    [
        ("auto", False),
        ("torch,triton", False),
        ("reference", False),
        ("triton,torch", True),
        ("flash_attn", True),
        ("flash_attn_3,torch", True),
    ],
)
def test_backends_with_kernels_for_documents_get_all_of_them_at_once(
    backend: str, in_one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        type(attention), "run", lambda self, _, call: calls.append(call.mask.runs) or call.q
    )
    q, k, v = inputs(s=64, t=64)
    attention(q, k, v, Mask(PACKED).prepare(64, 64), backend=backend)
    assert calls == ([((16, 16, 16, -16), (5, -2, 40, 17))] if in_one_call else [None] * 4)
