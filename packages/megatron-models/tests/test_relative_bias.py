"""Buckets of relative positions, against T5's definition and by hand."""

import math
from dataclasses import replace

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import EncoderDecoderConfig, Placement
from megatron_models.components.relative_bias.module import RelativeBias, distance_buckets
from megatron_models.components.relative_bias.spec import RelativeBiasSpec
from megatron_parallel import Mesh
from refusals.cases.case import SMALL

CONFIG = EncoderDecoderConfig(
    **{**SMALL, "max_position_embeddings": 300}, position_embedding_type="relative"
)


def bias(*, bidirectional):
    """Returns biases whose value is the number of the bucket, plus 100 times that of the head."""
    spec = CONFIG.component(RelativeBiasSpec, bidirectional=bidirectional)
    module = RelativeBias(spec, Placement(Mesh.single(), dtype=torch.float64))
    numbers = torch.arange(32, dtype=torch.float64)[:, None]
    module.weight.data = numbers + 100 * torch.arange(4, dtype=torch.float64)
    return module


def test_half_of_the_buckets_hold_one_distance_and_the_others_grow_exponentially():
    """By Raffel et al. 2020: 16 exact buckets, and 16 that divide 16 to 128 logarithmically."""
    found = distance_buckets(32, 128).tolist()
    assert found[:16] == list(range(16))
    for distance in range(16, 129):
        exact = 16 + math.log(distance / 16) / math.log(128 / 16) * 16
        near = abs(exact - round(exact)) < 1e-5
        assert found[distance] in ({31} if exact >= 31 else {int(exact)}) or near
    assert found[127] == found[128] == 31


@pytest.mark.parametrize(("distance", "bucket"), [(7, 7), (8, 8), (12, 9), (16, 10), (200, 15)])
def test_encoder_biases_differ_before_and_after_a_query(distance, bucket):
    found = bias(bidirectional=True)(Mask(causal=False), 201, 201, 0)
    assert found.shape == (1, 4, 201, 201)
    assert found[0, 0, distance, 0] == bucket  # the key is before the query
    assert found[0, 0, 0, distance] == 16 + bucket
    assert found[0, 3, 0, distance] == 316 + bucket


def test_decoder_biases_follow_new_queries_and_the_positions_of_a_mask():
    module = bias(bidirectional=False)
    whole = module(Mask(), 6, 6, 0)
    assert whole[0, 1, 5].tolist() == [105, 104, 103, 102, 101, 100]
    assert torch.equal(module(Mask(), 2, 6, 4), whole[:, :, 4:])
    keys = torch.arange(6, dtype=torch.int32).expand(2, -1)
    mask = Mask(positions=keys, query_positions=torch.tensor([[2], [5]], dtype=torch.int32))
    of_rows = module(mask, 1, 6, 5)
    assert torch.equal(of_rows[1], whole[0, :, 5:]) and of_rows[0, 0, 0, 0] == 2


def test_the_table_is_cut_over_heads_and_gets_a_gradient():
    module = bias(bidirectional=True)
    assert module.sharding["weight"].dim == 1 and module.sharding["weight"].axis == "tp"
    spec = CONFIG.component(RelativeBiasSpec, bidirectional=True)
    assert spec.parameters()["weight"].looked_up and spec.sharding().shape == (32, 4)
    assert spec.sharding().tied is None and replace(spec, tied_axis="pp").sharding().tied == "pp"
    module(Mask(causal=False), 3, 3, 0).sum().backward()
    counts = torch.zeros(32)
    counts[[0, 1, 2, 17, 18]] = torch.tensor([3.0, 2.0, 1.0, 2.0, 1.0])
    assert torch.equal(module.weight.grad[:, 0].float(), counts)
