"""Tests of the Triton kernels in Triton's interpreter; `test_triton.py` runs them in a process.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own.
"""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_kernels import (
    Backend,
    Pages,
    Scores,
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
    paged_attention,
    pointwise,
    quantize_tensor,
    rms_norm,
    rope,
    rope_qkv,
    softmax,
    swiglu,
    vocab_cross_entropy,
    vocab_cross_entropy_gradient,
    vocab_embedding,
)
from megatron_kernels.case import Case
from megatron_kernels.cases import CASES
from megatron_kernels.check import Inputs, check_backend
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops.activation.glu import Gate
from megatron_kernels.ops.activation.pointwise import Pointwise
from megatron_kernels.ops.dropout.bias_dropout_add import DropoutSite
from megatron_kernels.ops.triton_op import interprets
from megatron_kernels.triton_kernels import norm as kernels
from megatron_kernels.triton_kernels import paged_attention as kernels_of_pages
from torch import Tensor

pytestmark = pytest.mark.sampled(4)

CPU, F64 = torch.device("cpu"), torch.float64
TRITON = [case for case in CASES if any(b.name == "triton" for b in case.op.backends)]
DTYPES = (torch.float64, torch.bfloat16, torch.float32, torch.float16)
LONG = ("strided", "nan", "inf")
HALVES = {torch.bfloat16: torch.float16}  # the interpreter cuts numbers off to bfloat16
FIRST = {case.op.name: case for case in reversed(TRITON)}
CALLS = [
    pytest.param(
        case,
        dtype,
        id=f"{case.op.name}-{case.label or 'plain'}-{dtype}",
        marks=() if dtype in DTYPES[:2] else pytest.mark.slow,
    )
    for case in TRITON
    for dtype in (DTYPES if case is FIRST[case.op.name] else DTYPES[:1])
]


def backend_of(case: Case) -> Backend:
    return case.op.backend("triton")


def test_the_interpreter_is_on_and_backends_that_never_ran_are_used_on_request_only() -> None:
    assert interprets()
    assert len({case.op.name for case in TRITON}) == 26
    for case in TRITON:
        choice = case.op.explain(*case.arguments(InputGenerator(torch.float32, CPU)))
        if backend_of(case).on_request is not None:
            assert choice.backend != "triton"
            assert "triton" in str(choice) and "never run on a GPU by this project" in str(choice)


@pytest.mark.parametrize(("case", "dtype"), CALLS)
def test_kernels_equal_the_reference_in_float64(case: Case, dtype: torch.dtype) -> None:
    if case.op.name.startswith("attention"):
        dtype = HALVES.get(dtype, dtype)
    result = check_backend(case, backend_of(case), dtype, CPU)
    assert result.unsupported_reason is None and result.passed, result


@pytest.mark.parametrize(
    "inputs",
    ["empty", "one", *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)],
)
def test_other_inputs_give_what_the_reference_gives(inputs: Inputs) -> None:
    slow = () if inputs in ("empty", "one") else ("rope", "rope_qkv")
    for name, case in FIRST.items():
        if name in slow:
            continue
        dtype = torch.float16 if name.startswith("attention") else torch.bfloat16
        result = check_backend(case, backend_of(case), dtype, CPU, inputs)
        assert result.passed, result
        reason = result.unsupported_reason
        excused = case.in_place and inputs == "strided"
        assert reason is None or excused or (name == "ssd_scan" and inputs == "empty")


def test_check_catches_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose backward pass forgets the gradient of the sum."""
    true = kernels.norm_backward

    def wrong(dy: Tensor, dsum: Tensor | None, *rest: object) -> object:
        return true(dy, None, *rest)

    (case,) = (c for c in TRITON if c.op is add_rms_norm and not c.label)
    assert check_backend(case, backend_of(case), F64, CPU).passed
    monkeypatch.setattr(kernels, "norm_backward", wrong)
    result = check_backend(case, backend_of(case), F64, CPU)
    assert result.error < 1e-12 and not result.passed


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
    tokens = torch.tensor([[9] * 20 + [4, 3, 8, 7, 12], [9] * 15 + [7, 6, 2] + [11] * 7])
    dy = draw.normal(*tokens.shape, 259).detach()
    for first in (False, True):
        found, expected = (
            add_vocab_gradient(torch.ones(8, 259, dtype=F64), dy, tokens, 4, first, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both_equal(vocab_embedding, (draw.normal(8, 5), tokens[:, 18:], 4))


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


def test_long_sequences_in_blocks_are_added_from_parts() -> None:
    """Has one or two parts; one sequence ends at the end of a part, one has a single key."""
    draw = InputGenerator(F64, CPU)
    lengths = (kernels_of_pages.PART, kernels_of_pages.PART + 70, 1)
    used = -(-max(lengths) // 16)
    q = draw.normal(2, 3, 2, 8).detach()
    k, v = (draw.normal(3 * used, 16, 1, 8, mean=mean).detach() for mean in (0, 1))
    tables = torch.randperm(3 * used).view(3, used).int()
    pages = Pages(tables, torch.tensor(lengths).int())
    every = Scores(softcap=3.0, slopes=torch.rand(2) / 100, sinks=torch.randn(2))
    results = []
    for window, scores in ((None, Scores()), (550, every), (3, every)):
        found, expected = (
            paged_attention(q, k, v, pages, window, scores, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        results.append(found)
    # The same bits alone, in a table of another width.
    alone = Pages(tables[:1, : lengths[0] // 16], torch.tensor(lengths[:1]).int())
    one = paged_attention(q[:, :1], k, v, alone, backend="triton")
    assert torch.equal(one, results[0][:, :1])


def test_parts_are_weighted_by_their_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of one of two parts are higher by about 3."""
    monkeypatch.setattr(kernels_of_pages, "PART", 16)
    for larger in (0, 1):
        check_parts(InputGenerator(F64, CPU), larger)


def check_parts(draw: InputGenerator, larger: int) -> None:
    q, k, v = (draw.normal(*shape).detach() for shape in ((1, 1, 1, 4), *[(2, 16, 1, 4)] * 2))
    k[larger] += 1.5 * q[0] / q[0].square().sum() * 4**0.5 * 2
    pages = Pages(torch.tensor([[0, 1]]).int(), torch.tensor([25]).int())
    found, expected = (
        paged_attention(q, k, v, pages, None, Scores(), backend=name)
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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


def test_only_the_wanted_gradients_are_needed() -> None:
    x, added = torch.randn(3, 9, dtype=F64, requires_grad=True), torch.randn(3, 9, dtype=F64)
    for part in (0, 1):  # the sum alone, then the norm alone
        found, expected = (
            torch.autograd.grad(add_rms_norm(x, added, None, backend=name)[part].sin().sum(), x)[0]
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_every_number_of_16_bits_becomes_the_number_that_torch_casts_it_to() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.bfloat16, torch.float16):
        x, one = every.view(dtype).view(256, 256), torch.ones(())
        for elements in ("e4m3", "e5m2"):
            found, expected = (
                quantize_tensor(x, elements, scale=one, backend=name)
                for name in ("triton", "reference")
            )
            nan = expected.rows.float().isnan()
            for one_way, other in zip(found[:2], expected[:2], strict=True):
                same = one_way.view(torch.uint8) == other.view(torch.uint8)
                assert (same | (one_way.float().isnan() & other.float().isnan())).all()
            assert torch.equal(found.rows.float().isnan(), nan) and nan.any() and not nan.all()


def test_a_tensor_of_zeros_has_the_scale_1() -> None:
    for rule in ("float32", "power_of_two"):
        found = quantize_tensor(torch.zeros(3, 5), "e4m3", rule, backend="triton")
        assert found.scale == 1 and not found.rows.float().any() and not found.columns.float().any()


CASTS = [  # dtype, elements, rule, scale, rows, columns, whether the magnitude is wanted
    (torch.float32, "e4m3", "float32", None, True, True, True),
    (torch.float32, "e5m2", "power_of_two", None, True, False, True),
    (torch.float64, "e4m3", "power_of_two", None, False, True, True),
    (torch.float64, "e4m3", "float32", None, True, True, True),
    (torch.bfloat16, "e4m3", "float32", 0.0, True, True, True),
    (torch.float32, "e4m3", "float32", 2e-6, True, True, True),  # clips
    (torch.float32, "e4m3", "power_of_two", 2e-5, True, True, False),
]


def test_casts_with_every_option_have_the_bits_of_the_reference() -> None:
    """Several matrices of several tiles, of which the last has the largest number."""
    numbers = 3e-3 * torch.randn(2, 3, 700, dtype=F64)
    numbers[1, 2, 699] = -0.03
    for dtype, elements, rule, scale, *rest in CASTS:
        given = None if scale is None else torch.tensor(scale)
        whole = dtype is torch.float32 and scale is None
        for x in (numbers if whole else numbers[..., 570:], numbers[:, :0]):
            found, expected = (
                quantize_tensor(x.to(dtype), elements, rule, given, *rest, backend=name)
                for name in ("triton", "reference")
            )
            for one, other in zip(found, expected, strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert torch.equal(one.double(), other.double()), (dtype, elements, rule, scale)


def both_equal(op: object, arguments: tuple[object, ...]) -> None:
    """Compares values and gradients of the kernels with those of the reference, in float64."""
    case = Case(op, "", lambda _: arguments)  # type: ignore[arg-type]
    result = check_backend(case, backend_of(case), F64, CPU)
    assert result.unsupported_reason is None and result.passed, result
