"""Norms of queries and keys against torch's RMSNorm."""

import pytest
import torch
from megatron_models import Placement
from megatron_models.components.attention.qk_norm import QKNorm
from megatron_models.components.attention.qk_norm_spec import QKNormSpec
from megatron_parallel import Mesh
from torch.nn import functional

F64 = torch.float64


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_heads_are_normalized_alone_or_together(whole, centred):
    spec = QKNormSpec(
        num_layers=1,
        hidden_size=12 if whole else 4,
        normalization="RMSNorm",
        norm_epsilon=0.1,
        apply_layernorm_1p=centred,
        whole=whole,
    )
    assert {cut.partial for cut in spec.shardings().values()} == {"tp"}
    norm = QKNorm(spec, Placement(Mesh.single(), dtype=F64), 0, 1)
    draw = torch.Generator().manual_seed(3)
    norm.weight.data = torch.randn(norm.weight.shape, generator=draw, dtype=F64)
    x = torch.randn(5, 2, 3, 4, generator=draw, dtype=F64).requires_grad_()
    found = norm(x)
    gain = norm.weight + 1 if centred else norm.weight
    rows = x.flatten(2) if whole else x
    expected = functional.rms_norm(rows, rows.shape[-1:], gain, 0.1).view_as(x)
    dy = torch.randn(x.shape, generator=draw, dtype=F64)
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, (x, norm.weight), dy)),
        (expected, *torch.autograd.grad(expected, (x, norm.weight), dy)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_heads_of_low_precision_are_normalized_together_in_float32():
    spec = QKNormSpec(num_layers=1, hidden_size=600, normalization="RMSNorm", whole=True)
    norm = QKNorm(spec, Placement(Mesh.single(), dtype=torch.bfloat16), 0, 1)
    norm.weight.data.fill_(1)
    x = torch.randn(5, 2, 3, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    x.requires_grad_()
    y = norm(x)
    exact = functional.rms_norm(x.detach().double().flatten(2), (600,), None, 1e-5).view_as(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)
    of_x, of_gain = torch.autograd.grad(y.sum(), (x, norm.weight))
    assert of_x.dtype == of_gain.dtype == torch.bfloat16
    torch.testing.assert_close(of_gain.double(), exact.flatten(2).sum((0, 1)), rtol=2**-7, atol=0)
