"""Gradients of short attention in 16 bits on a CPU, against float64 and torch's own kernel."""

import pytest
import torch
from megatron_kernels import Mask, attention
from megatron_kernels.ops.attention import short_halves
from torch.nn.functional import scaled_dot_product_attention


def gradients(function, *tensors):
    """Returns gradients of `function` for a fixed gradient of its result."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    out.backward(weights.to(out.dtype))
    return [leaf.grad.double() for leaf in leaves]


def by_torch(q, k, v):
    out = scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return out.permute(2, 0, 1, 3)


def ours(q, k, v):
    return attention(q, k, v, Mask(causal=True), backend="torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("length", [1, 37, 256])
def test_gradients_are_as_exact_as_those_of_the_kernel_in_16_bits(dtype, groups, length):
    generator = torch.Generator().manual_seed(length)
    shapes = [(length, 2, heads, 24) for heads in (4, groups, groups)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = gradients(by_torch, *(x.double() for x in given))
    before, now = gradients(by_torch, *given), gradients(ours, *given)
    errors = [0.0, 0.0]
    for true, theirs, own in zip(exact, before, now, strict=True):
        largest = true.abs().max().clamp(min=1e-3)
        error = (own - true).abs().max() / largest
        assert error < 10 * torch.finfo(dtype).eps
        assert (own - true).norm() <= 1.05 * (theirs - true).norm() + 1e-6
        rounding = [float((x - true).norm()) for x in (own, theirs)]
        errors = [sum(pair) for pair in zip(errors, rounding, strict=True)]
    # One token has a single probability of 1, and nothing to round.
    assert length == 1 or errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"length": 257}, False), ({"dtype": torch.float32}, False), ({"b": 0}, False)],
)
def test_only_short_sequences_in_16_bits_are_upcast(changes, expected):
    given = {"length": 256, "dtype": torch.bfloat16, "b": 1} | changes
    q = torch.empty(given["b"], 2, given["length"], 8, dtype=given["dtype"])
    assert short_halves.is_short_half(q, q) is expected
    one = q[:, :, :1]  # the longer of queries and keys counts
    assert short_halves.is_short_half(one, q) is short_halves.is_short_half(q, one) is expected
    assert not short_halves.is_short_half(q.to("meta"), q.to("meta"))
