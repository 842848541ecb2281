"""Tests of rows in Triton's interpreter (norms, losses, ...); `test_triton.py` runs them."""

from typing import get_args

import pytest
import torch
from equal_to_reference import CPU, F64, both_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import (
    add_layer_norm,
    add_rms_norm,
    add_vocab_gradient,
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    cross_entropy,
    gelu,
    glu,
    layer_norm,
    pointwise,
    rms_norm,
    rope,
    rope_qkv,
    softmax,
    swiglu,
    vocab_cross_entropy,
    vocab_cross_entropy_gradient,
    vocab_embedding,
)
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops.activation.glu import Gate
from megatron_kernels.ops.activation.pointwise import Pointwise
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite, hashes
from torch import Tensor


@settings(max_examples=4, deadline=None, derandomize=True)
@given(rows=st.integers(0, 5), h=st.integers(1, 70), zero_centered=st.booleans())
def test_norms_of_drawn_shapes(rows: int, h: int, zero_centered: bool) -> None:
    draw = InputGenerator(F64, CPU, seed=rows * 100 + h)
    x, weight = draw.normal(rows, h, mean=0.3), draw.normal(h, mean=1)
    both_equal(rms_norm, (x, weight, 1e-5, zero_centered))
    both_equal(layer_norm, (x, weight, draw.normal(h), 1e-3, zero_centered))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(rows=st.integers(0, 4), f=st.integers(1, 1500))
def test_gated_units_of_drawn_shapes(rows: int, f: int) -> None:
    draw = InputGenerator(F64, CPU, seed=rows * 100 + f)
    both_equal(swiglu, (draw.normal(rows, 2, f),))
    both_equal(glu, (draw.normal(rows, 2, f), "gelu", 0.5, 1.0))


def test_losses_of_vocabularies_of_several_blocks() -> None:
    for vocabulary in (1, 37, 4096, 9001):
        check_losses(InputGenerator(F64, CPU), vocabulary)


def check_losses(draw: InputGenerator, vocabulary: int) -> None:
    logits = draw.normal(3, vocabulary)
    with torch.no_grad():
        logits[0, vocabulary // 2 + 1 :] = -torch.inf  # as of padding tokens
    targets = torch.tensor([0, vocabulary - 1, -100])
    both_equal(cross_entropy, (logits, targets))
    own, lse = logits.detach(), torch.randn(3, dtype=F64)
    for valid in {vocabulary, vocabulary - vocabulary // 3}:
        both_equal(vocab_cross_entropy, (own, targets, valid))
        both_equal(
            vocab_cross_entropy_gradient, (own, targets, lse, lse.cos(), valid, 0.9, 0.1, False)
        )


def test_a_gradient_is_written_over_the_logits_if_that_is_allowed() -> None:
    logits, numbers = torch.randn(3, 2, 7), torch.randn(3, 2)
    targets = torch.zeros(3, 2, dtype=torch.int64)
    for x in (logits.clone(), logits.clone().mT.contiguous().mT):
        given = x, targets, numbers, numbers, 7, 1.0, 0.0
        expected = vocab_cross_entropy_gradient(*given, backend="reference")
        found = vocab_cross_entropy_gradient(*given, overwrites=True, backend="triton")
        torch.testing.assert_close(found, expected)
        assert (found is x) == x.is_contiguous()


def test_rows_of_several_thousand_elements() -> None:
    draw = InputGenerator(F64, CPU)
    x, weight = draw.normal(2, 5000), draw.normal(5000)
    both_equal(add_rms_norm, (x, draw.normal(2, 5000, mean=0.1), weight, 1e-5, False))
    both_equal(softmax, (x, None, 0.3))
    bias, pairs = draw.normal(1030), draw.normal(2, 1030)
    both_equal(bias_gelu, (draw.normal(2, 1030), bias, "tanh"))
    both_equal(bias_swiglu, (draw.normal(2, 2, 1030), pairs))
    tokens = torch.tensor([[5, 2], [4, 7]])  # of rows from 4 on, in two blocks
    rows = (vocab_embedding(pairs, tokens, 4, backend=name) for name in ("triton", "reference"))
    assert torch.equal(*rows)


def test_empty_tensors() -> None:
    draw = InputGenerator(F64, CPU)
    both_equal(rms_norm, (draw.normal(0, 3, 8), draw.normal(8), 1e-5, False))
    both_equal(gelu, (draw.normal(0), "none"))
    both_equal(softmax, (draw.normal(0, 4), None, 1.0))
    both_equal(cross_entropy, (draw.normal(0, 7), torch.zeros(0, dtype=torch.int64)))
    angles = torch.zeros(0, 1, 4, dtype=F64)
    assert rope(draw.normal(0, 2, 3, 8), angles, angles, backend="triton").shape == (0, 2, 3, 8)


def test_every_activation_on_a_few_numbers() -> None:
    draw = InputGenerator(F64, CPU)
    x, pairs, bias = draw.normal(2, 3), draw.normal(3, 2, 3), draw.normal(3)
    for kind in get_args(Pointwise):
        both_equal(pointwise, (x, kind))
    for gate in get_args(Gate):
        both_equal(glu, (pairs, gate, 0.75, 0.5))
    for approximate in ("none", "tanh"):
        both_equal(gelu, (x, approximate))
        both_equal(bias_gelu, (x, bias, approximate))
    both_equal(bias_swiglu, (pairs, draw.normal(2, 3)))


def test_gradients_at_zero_and_at_the_bounds_of_a_gated_unit() -> None:
    ends = torch.tensor([[0.0, 0.75, -0.75], [0.75, -0.75, 0.0]], dtype=F64, requires_grad=True)
    for kind in ("relu", "squared_relu"):
        both_equal(pointwise, (ends, kind))
    given = (("triton", 0.75), ("reference", 0.0))  # as without bounds: the gradient passes there
    found, expected = (glu(ends, "silu", bound, 0.5, backend=name) for name, bound in given)
    grads = (torch.autograd.grad(y.sin().sum(), ends)[0] for y in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_a_bias_alone_has_a_gradient() -> None:
    draw, words = InputGenerator(F64, CPU), torch.zeros(2, 1, dtype=torch.int32)
    x, pairs = draw.normal(2, 1, 3).detach(), draw.normal(2, 2, 3).detach()
    both_equal(bias_gelu, (x, draw.normal(3), "none"))
    both_equal(bias_swiglu, (pairs, draw.normal(2, 3)))
    site = DropoutSite(1, 2, 0, 2.0)
    both_equal(bias_dropout_add, (x, draw.normal(3), x, words, words, site))


def test_every_option_of_norms_and_dropout_on_a_few_numbers() -> None:
    draw = InputGenerator(F64, CPU)
    x, added, gain, shift = (
        draw.normal(4, 5),
        draw.normal(4, 5, mean=1),
        draw.normal(5),
        draw.normal(5),
    )
    for zero_centered in (False, True):
        both_equal(add_layer_norm, (x, added, gain, shift, 1e-2, zero_centered))
        both_equal(add_rms_norm, (x, added, gain, 1e-2, zero_centered))
        both_equal(layer_norm, (x, gain, None, 1e-2, zero_centered))
    both_equal(rms_norm, (x, None, 1e-2))
    # Gains are not centered at zero by default.
    both_equal(rms_norm, (x, gain, 1e-2))
    both_equal(layer_norm, (x, gain, shift, 1e-2))
    both_equal(add_rms_norm, (x, added, gain, 1e-2))
    both_equal(add_layer_norm, (x, added, gain, shift, 1e-2))
    allowed = torch.arange(20).view(4, 5) % 3 > 0
    allowed[2] = False  # a row without allowed entries
    both_equal(softmax, (x, allowed, 0.7))
    stream, words = draw.normal(2, 2, 3), torch.arange(8, dtype=torch.int32).view(2, 2, 2)
    site = DropoutSite(-(2**31) + 3, 77, -(2**31) + 2**30, 4 / 3)
    for bias in (None, draw.normal(3)):
        given = stream, bias, draw.normal(2, 2, 3, mean=1), words[0], words[1] - 5, site
        both_equal(bias_dropout_add, given)


def test_some_channels_of_a_fused_projection_are_rotated() -> None:
    """With sums of the gradients of repeated keys, and with keys of two groups."""
    draw = InputGenerator(F64, CPU)
    angles, own = draw.normal(2, 1, 2).detach(), draw.normal(2, 2, 2).detach()
    for interleaved in (False, True):
        for groups in (1, 2):
            fused = draw.normal(2, 1, groups, 5, 6)  # three queries, of which four channels turn
            given = fused, angles.cos(), angles.sin(), interleaved, groups == 1
            both_equal(rope_qkv, given)
        both_equal(rope, (draw.normal(2, 2, 1, 5), own.cos(), own.sin(), interleaved))


def test_gradients_of_frequent_rows_are_added_in_several_steps() -> None:
    """More tokens of a row than a program reads at once, and two programs for its columns."""
    draw = InputGenerator(F64, CPU)
    tokens = torch.tensor([[9] * 20 + [4, 3, 8, 7, 12], [9] * 14 + [4, 7, 6, 2] + [11] * 7])
    dy = draw.normal(*tokens.shape, 259).detach()
    for first in (False, True):
        found, expected = (
            add_vocab_gradient(torch.ones(8, 259, dtype=F64), dy, tokens, 4, first, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both_equal(vocab_embedding, (draw.normal(8, 5), tokens[:, 18:], 4))
    for row in (4, 5):  # the first two, which alone have tokens
        both_equal(vocab_embedding, (draw.normal(2, 5), torch.full((3,), row), 4))


def test_tensors_that_are_not_contiguous() -> None:
    draw = InputGenerator(F64, CPU)

    def strided(*shape: int) -> Tensor:
        return draw.normal(*reversed(shape)).detach().permute(*reversed(range(len(shape))))

    def leaf(x: Tensor) -> Tensor:
        return x.requires_grad_()

    both_equal(add_rms_norm, (leaf(strided(3, 2, 9)), leaf(strided(3, 2, 9)), None, 1e-5, False))
    heads = draw.normal(3, 2, 5, 4, 8).detach()
    for view in (
        heads[..., 2, :],
        heads[:, :1, :, 3],
        heads[:, 1:, :, 0],
        heads[:, :, 2:3, 1],
        heads[..., 1, :].mT,
    ):
        both_equal(rms_norm, (leaf(view), draw.normal(view.shape[-1]), 1e-5, False))
        both_equal(add_rms_norm, (leaf(view), None, None, 1e-5, False))
    both_equal(swiglu, (leaf(strided(4, 2, 9)),))
    both_equal(softmax, (leaf(strided(4, 9)), strided(1, 9) > 0, 1.0))
    both_equal(cross_entropy, (leaf(strided(6, 9)[::2]), torch.tensor([[1, 2, 3]]).t()[:, 0]))
    angles = draw.normal(5, 1, 4).detach()
    both_equal(rope, (leaf(strided(5, 2, 3, 8)), angles.cos(), angles.sin(), True))
    fused = leaf(strided(5, 2, 2, 5, 8))
    both_equal(rope_qkv, (fused, angles.cos(), angles.sin(), False))


def test_a_norm_reads_the_sum_as_it_is_stored() -> None:
    """2048 + 0.9 is 2048 in float16, so that all numbers of the row are equal."""
    x, added = torch.full((1, 8), 2048.0).half(), torch.zeros(1, 8).half()
    added[0, 3] = 0.9
    bias, weight = torch.linspace(-1, 1, 8).half(), torch.ones(8).half()
    total, y = add_layer_norm(x, added, weight, bias, backend="triton")
    assert torch.equal(total, x) and torch.equal(y, bias[None])


def test_numbers_that_are_not_finite_stay_in_their_rows() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        check_rows(InputGenerator(torch.float32, CPU), value)


def check_rows(draw: InputGenerator, value: float) -> None:
    x = draw.normal(3, 9).detach()
    x[1, 4] = value
    for op, rest in ((rms_norm, (None,)), (softmax, ()), (gelu, ()), (gelu, ("tanh",))):
        found, expected = (op(x, *rest, backend=name) for name in ("triton", "reference"))
        assert torch.equal(found.isfinite(), expected.isfinite()), op.name
        assert torch.equal(found.isnan(), expected.isnan()), op.name
    loss = cross_entropy(x, torch.tensor([0, 0, 0]), backend="triton")
    assert loss[[0, 2]].isfinite().all()
    assert loss[1].isfinite() == (value == -torch.inf)


def test_a_gain_of_another_dtype() -> None:
    x, gain = torch.randn(3, 9).bfloat16().requires_grad_(), torch.randn(9, requires_grad=True)
    y = rms_norm(x, gain, backend="triton")
    assert y.dtype == torch.bfloat16
    dx, dgain = torch.autograd.grad(y.float().sum(), (x, gain))
    assert (dx.dtype, dgain.dtype) == (torch.bfloat16, torch.float32)


def test_dropout_keeps_the_share_of_elements() -> None:
    words = torch.arange(8, dtype=torch.int32).view(4, 2)
    x, residual = torch.ones(4, 2, 2048), torch.zeros(4, 2, 2048)
    site = DropoutSite(7, 11, -(2**31) + 2**30, 4 / 3)  # a quarter is dropped
    found = bias_dropout_add(x, None, residual, words, words, site, backend="triton")
    assert abs(float((found == 0).float().mean()) - 0.25) < 0.02
    assert float(found.max()) == pytest.approx(4 / 3)


def test_dropout_of_a_wide_row_keeps_an_element_whose_hash_is_the_least() -> None:
    draw, words = InputGenerator(F64, CPU), torch.tensor([[5], [-7]], dtype=torch.int32)
    x = draw.normal(1, 1, 1030)
    least = hashes(torch.tensor(1028), torch.tensor(5 + 11), torch.tensor(-7 ^ 13))
    site = DropoutSite(11, 13, int(least), 2.0)
    given = x, draw.normal(1030), torch.zeros_like(x), words[:1], words[1:], site
    both_equal(bias_dropout_add, given)
    assert bias_dropout_add(*given, backend="triton")[..., 1028] != 0


def test_only_the_wanted_gradients_are_needed() -> None:
    x, added = torch.randn(3, 9, dtype=F64, requires_grad=True), torch.randn(3, 9, dtype=F64)
    for part in (0, 1):  # the sum alone, then the norm alone
        found, expected = (
            torch.autograd.grad(add_rms_norm(x, added, None, backend=name)[part].sin().sum(), x)[0]
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
