"""The elementwise and row-wise operations against formulas and hand-computed numbers."""

import math

import pytest
import torch
from megatron_kernels import (
    cross_entropy,
    gelu,
    glu,
    layer_norm,
    pointwise,
    rms_norm,
    softmax,
    swiglu,
)

F64 = torch.float64
both = pytest.mark.parametrize("backend", ["torch", "reference"])


def close(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=1e-12)


@both
def test_layer_norm_by_hand(backend: str) -> None:
    # mean 3, variance (4 + 0 + 4) / 3, eps makes it 8/3 + 1/3 = 3
    x, gain = torch.tensor([1.0, 3.0, 5.0], dtype=F64), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    bias = torch.tensor([0.5, 0.0, -1.0], dtype=F64)
    root = math.sqrt(3)
    found = layer_norm(x, gain, bias, 1 / 3, backend=backend)
    close(found, [-2 / root + 0.5, 0.0, 6 / root - 1])


@both
def test_rms_norm_by_hand(backend: str) -> None:
    # mean square (1 + 49) / 2 = 25, eps makes it 36
    x, gain = torch.tensor([1.0, 7.0], dtype=F64), torch.tensor([3.0, -1.0], dtype=F64)
    close(rms_norm(x, gain, 11.0, backend=backend), [0.5, -7 / 6])


@both
def test_gelu_by_hand(backend: str) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=F64)
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    close(gelu(x, backend=backend), exact)
    inner = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in x.tolist()]
    tanh = [0.5 * v * (1 + math.tanh(i)) for v, i in zip(x.tolist(), inner, strict=True)]
    close(gelu(x, "tanh", backend=backend), tanh)


@both
def test_swiglu_gates_with_the_first_half(backend: str) -> None:
    x = torch.tensor([[0.0, 2.0], [5.0, -3.0]], dtype=F64)
    close(swiglu(x, backend=backend), [0.0, -6 / (1 + math.exp(-2))])


@both
def test_pointwise_activations_by_hand(backend: str) -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=F64)
    close(pointwise(x, "relu", backend=backend), [0.0, 0.0, 3.0])
    close(pointwise(x, "squared_relu", backend=backend), [0.0, 0.0, 9.0])
    close(
        pointwise(x, "silu", backend=backend), [-2 / (1 + math.e**2), 0.0, 3 / (1 + math.exp(-3))]
    )
    quick = [-2 / (1 + math.exp(3.404)), 0.0, 3 / (1 + math.exp(-5.106))]
    close(pointwise(x, "quick_gelu", backend=backend), quick)


@both
def test_a_gated_unit_bounds_gate_and_up_and_adds_the_offset(backend: str) -> None:
    # gpt-oss: the gate is bounded from above only, up from both sides.
    x = torch.tensor([[-9.0, 9.0, 2.0], [-8.0, 8.0, 0.5]], dtype=F64)
    expected = [
        gate / (1 + math.exp(-1.702 * gate)) * (up + 1)
        for gate, up in [(-9.0, -7.0), (7.0, 7.0), (2.0, 0.5)]
    ]
    close(glu(x, "quick_gelu", 7.0, 1.0, backend=backend), expected)
    close(glu(x, "relu", backend=backend), [0.0, 72.0, 1.0])


@pytest.mark.parametrize("options", [(), (0.6, 1.0)], ids=["", "bounded"])
@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
def test_gradients_of_gated_units_equal_differences(gate: str, options: tuple[float, ...]) -> None:
    x = torch.randn(3, 2, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(
        lambda x: glu(x, gate, *options, backend="torch"), x.requires_grad_()
    )


@both
def test_a_gain_is_one_plus_its_weight_on_request(backend: str) -> None:
    x, weight = torch.tensor([1.0, 7.0], dtype=F64), torch.tensor([2.0, -2.0], dtype=F64)
    close(rms_norm(x, weight, 11.0, True, backend=backend), [0.5, -7 / 6])
    shift = torch.tensor([0.5, 0.0], dtype=F64)
    close(layer_norm(x, weight, shift, 0.0, True, backend=backend), [-2.5, -1.0])
    close(layer_norm(x, weight, None, 0.0, True, backend=backend), [-3.0, -1.0])


@both
def test_one_plus_a_small_bfloat16_weight_is_not_rounded(backend: str) -> None:
    weight = torch.full((2,), 2.0**-9).bfloat16()  # 1 + 2^-9 is 1 in bfloat16
    x, shift = torch.tensor([129.0, -129.0]).bfloat16(), torch.full((2,), -1.0).bfloat16()
    found = layer_norm(x, weight, shift, 0.0, True, backend=backend)
    assert float(found[0]) == 2.0**-9


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_softmax_scales_masks_and_leaves_empty_rows_zero(backend: str, dtype: torch.dtype) -> None:
    logs = torch.tensor([[1.0, 3.0, 9.0]] * 2, dtype=F64).log().to(dtype)
    scores = logs.requires_grad_()
    allowed = torch.tensor([[True, True, False], [False, False, False]])
    found = softmax(scores, allowed, 2.0, backend=backend)
    tolerance = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    expected = torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    found.square().sum().backward()
    assert scores.grad is not None and torch.isfinite(scores.grad).all()


@both
def test_softmax_of_huge_scores_does_not_overflow(backend: str) -> None:
    scores = torch.tensor([1e4, 1e4, -1e4])
    close(softmax(scores, backend=backend), [0.5, 0.5, 0.0])
    allowed = torch.tensor([False, True, True])
    close(softmax(scores, allowed, backend=backend), [0.0, 1.0, 0.0])


@both
def test_cross_entropy_by_hand(backend: str) -> None:
    logits = torch.tensor([[[1.0, 2.0, 5.0]], [[0.0, 0.0, 0.0]]], dtype=F64)
    logits = torch.where(logits > 0, logits.log(), logits)  # shares 1/8 2/8 5/8, and thirds
    found = cross_entropy(logits, torch.tensor([[2], [0]]), backend=backend)
    assert found.shape == (2, 1)
    close(found[:, 0], [math.log(8 / 5), math.log(3)])


@both
def test_ignored_targets_have_no_loss_and_no_gradient(backend: str) -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, -100, 4]), backend=backend)
    loss.sum().backward()
    assert logits.grad is not None
    assert not loss[1].detach().any() and not logits.grad[1].any() and logits.grad[0].any()
    one_class = cross_entropy(torch.zeros(2, 1), torch.tensor([-100, 0]), backend=backend)
    assert one_class.tolist() == [0.0, 0.0]


@both
@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)],
    ids=str,
)
def test_the_loss_of_low_precision_logits_is_computed_in_float32(
    backend: str, given: torch.dtype, returned: torch.dtype
) -> None:
    logits, targets = torch.randn(5, 11).to(given), torch.randint(11, (5,))
    loss = cross_entropy(logits, targets, backend=backend)
    assert loss.dtype == returned
    truth = torch.logsumexp(logits.double(), -1) - logits.double()[range(5), targets]
    tolerance = 1e-12 if given is F64 else 1e-6
    torch.testing.assert_close(loss.double(), truth, rtol=tolerance, atol=tolerance)


@both
def test_normalisation_in_bfloat16_uses_float32_statistics(backend: str) -> None:
    # In bfloat16 the mean of 1000 values near 256 would be off by about one.
    x = (256 + torch.randn(4, 1000)).bfloat16()
    ones, zeros = torch.ones(1000).bfloat16(), torch.zeros(1000).bfloat16()
    truth = torch.nn.functional.layer_norm(x.double(), (1000,))
    found = layer_norm(x, ones, zeros, backend=backend)
    torch.testing.assert_close(found.double(), truth, rtol=1e-2, atol=1e-2)
    truth = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(
        rms_norm(x, ones, backend=backend).double(), truth, rtol=5e-3, atol=0
    )


@pytest.mark.parametrize("backend", ["torch", "batch-invariant", "reference"])
def test_the_gradient_passes_at_the_bound_of_a_gated_unit(backend: str) -> None:
    """At the bound as below it, and not beyond; `torch.clamp` differs there since torch 2.14."""
    bound = 2.0
    gates = torch.tensor([1.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    ups = torch.tensor([1.0, 1.0, 1.0, 2.0, -2.0, 2.5, -2.5], dtype=torch.float64)
    x = torch.stack((gates, ups)).requires_grad_()
    y = glu(x, "relu", bound, 1.0, backend=backend)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert y.tolist() == [2.0, 4.0, 4.0, 3.0, -1.0, 3.0, -1.0]  # max(gate, 0) * (up + 1)
    assert found[0].tolist() == [2.0, 2.0, 0.0, 3.0, -1.0, 3.0, -1.0]
    assert found[1].tolist() == [1.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0]
