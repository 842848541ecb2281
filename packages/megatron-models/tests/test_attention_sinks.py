"""Attention sinks of a layer against a softmax with one more column."""

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import Placement
from megatron_models.components.attention.module import Attention
from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.context import Context
from megatron_parallel import Mesh

F64 = torch.float64


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("options", [{}, {"softmax_scale": 0.7, "attn_logit_softcapping": 0.9}])
def test_a_sink_is_a_logit_of_each_head_without_a_value(small, kind, options):
    spec = small(softmax_type=kind, num_query_groups=2, **options).component(AttentionSpec)
    layer = Attention(spec, 0, Placement(Mesh.single(), dtype=F64))
    draw = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=F64)
    assert ("sinks.weight" in dict(layer.named_parameters())) == (kind == "learnable")
    x = torch.randn(5, 2, 24, generator=draw, dtype=F64)
    fused = torch.einsum("sbh,grh->sbgr", x, layer.qkv.weight) + layer.qkv.bias
    q, k, v = fused.unflatten(-1, (4, 6)).split((2, 1, 1), dim=3)
    k, v = (each.expand(-1, -1, -1, 2, -1).flatten(2, 3) for each in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q.flatten(2, 3), k) * (spec.softmax_scale or 6**-0.5)
    if spec.attn_logit_softcapping:
        scores = 0.9 * torch.tanh(scores / 0.9)
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    sinks = {"vanilla": torch.full((4,), -torch.inf), "off-by-one": torch.zeros(4)}.get(kind)
    sinks = layer.sinks.weight if sinks is None else sinks.double()
    column = sinks.view(1, 4, 1, 1).expand(2, -1, 5, -1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    attended = torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)
    expected = attended @ layer.out.weight.flatten(1).t() + layer.out.bias
    torch.testing.assert_close(layer(x, Context(Mask())), expected, rtol=1e-12, atol=1e-12)
