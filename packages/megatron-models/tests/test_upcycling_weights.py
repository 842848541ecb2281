"""Weights and configurations of upcycled models by hand; a run has those of whole models."""

import math
from dataclasses import replace

import pytest
import torch
from megatron_models import ConfigError, GPTConfig, MambaModelConfig
from megatron_models.upcycling.config import UPCYCLING_REFUSED, expert_weight_sum, upcycled_config
from megatron_models.upcycling.weights import upcycled_weights

SIZES = {"num_layers": 2, "hidden_size": 4, "vocab_size": 8, "max_position_embeddings": 8}
DENSE = GPTConfig(**SIZES, num_attention_heads=2, ffn_hidden_size=12)
GATED = replace(DENSE, activation="swiglu", add_bias_linear=False)


def drawn(config):
    """Returns a whole number for each element of each weight, no two of one weight equal."""
    found = {}
    for name, spec in config.parameters().items():
        count = math.prod(spec.sharding.shape)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(len(found)))
        found[name] = order.double().view(spec.sharding.shape)
    return found


@pytest.mark.parametrize(
    ("changes", "expected", "same"),
    [
        ({}, 1.0, True),
        ({"moe_router_topk_scaling_factor": 2.5}, 2.5, True),
        ({"moe_router_pre_softmax": True}, 2 / 8, False),
        ({"moe_router_pre_softmax": True, "moe_router_topk": 3}, 3 / 8, False),
        ({"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 4.0}, 1.0, False),
        ({"moe_router_score_function": "sigmoid"}, 1.0, True),
        ({"moe_router_score_function": "sqrtsoftplus"}, 1.0, True),
        (
            {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 1},
            0.8325546111576977,  # the root of the logarithm of 2
            False,
        ),
        ({"moe_router_score_function": "sigmoid", "moe_router_topk": 1}, 0.5, False),
        (
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_topk": 1,
                "moe_router_topk_scaling_factor": 3.0,
            },
            1.5,
            False,
        ),
    ],
)
def test_weights_of_equal_logits_have_this_sum(changes, expected, same):
    config = replace(DENSE, num_experts=8, **changes)
    total, fixed = expert_weight_sum(config)
    assert total == pytest.approx(expected, rel=1e-12) and fixed is same


def test_models_without_experts_have_no_sum():
    mamba = MambaModelConfig(**SIZES, mamba_num_groups=1, mamba_head_dim=4)
    for config in (DENSE, mamba):
        with pytest.raises(ConfigError, match="the model has no experts, so their weights have no"):
            expert_weight_sum(config)


@pytest.mark.parametrize("granularity", [1, 2, 3, 4])
@pytest.mark.parametrize("dense", [DENSE, GATED], ids=["biases", "gated"])
def test_experts_are_scaled_slices_of_the_dense_layer(dense, granularity):
    changes = {
        "num_experts": 2 * granularity,
        "moe_router_topk": granularity,
        "moe_router_topk_scaling_factor": 2.0,
    }
    config = upcycled_config(dense, granularity, changes)
    weights, width = drawn(dense), 12 // granularity
    assert config.moe_ffn_hidden_size == width and config.num_experts == 2 * granularity
    found = upcycled_weights(weights, config, granularity, seed=3)
    assert found.keys() == config.parameters().keys()
    for name, value in found.items():
        assert value.shape == config.parameters()[name].sharding.shape, name
        assert value.dtype == torch.float64, name
    for layer in range(2):
        prefix = f"layers.{layer}.mlp"
        for expert in range(2 * granularity):
            part = expert % granularity
            own = slice(part * width, (part + 1) * width)
            up = found[f"{prefix}.experts.up.weight"][expert]
            down = found[f"{prefix}.experts.down.weight"][expert]
            assert torch.equal(up, weights[f"{prefix}.up.weight"][..., own, :])
            assert torch.equal(down, weights[f"{prefix}.down.weight"][:, own] * granularity / 2)
            if dense is DENSE:
                up = found[f"{prefix}.experts.up.bias"][expert]
                down = found[f"{prefix}.experts.down.bias"][expert]
                assert torch.equal(up, weights[f"{prefix}.up.bias"][own])
                assert torch.equal(down, weights[f"{prefix}.down.bias"] / 2)
        router = found[f"{prefix}.router.weight"]
        first, second = router[:granularity], router[granularity:]
        assert (first == first[0]).all() and (second == second[0]).all()
        assert not torch.equal(first[0], second[0])
    assert found["layers.0.attention.qkv.weight"] is weights["layers.0.attention.qkv.weight"]


def test_weights_keep_the_dtype_of_the_dense_model_and_routers_depend_on_the_seed():
    config = upcycled_config(DENSE, 1, {"num_experts": 3})
    half = {name: value.bfloat16() for name, value in drawn(DENSE).items()}
    routers = [
        upcycled_weights(half, config, 1, seed)["layers.0.mlp.router.weight"] for seed in (1, 1, 2)
    ]
    assert all(router.dtype == torch.bfloat16 for router in routers)
    assert torch.equal(routers[0], routers[1]) and not torch.equal(routers[1], routers[2])
    assert 0.005 < float(routers[0].float().std()) < 0.05  # init_method_std is 0.02


@pytest.mark.parametrize("name", UPCYCLING_REFUSED)
def test_fields_that_would_change_the_function_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be set by upcycling"):
        upcycled_config(DENSE, 1, {"num_experts": 4, name: 1})


@pytest.mark.parametrize(
    ("granularity", "changes", "words"),
    [
        (1, {}, "upcycling needs experts; set num_experts"),
        (1, {"num_experts": 0}, "upcycling needs experts; set num_experts"),
        (5, {"num_experts": 5}, "granularity of 5 does not divide ffn_hidden_size 12; use 4 or 6"),
        (0, {"num_experts": 4}, "granularity of 0 does not divide ffn_hidden_size 12"),
        (24, {"num_experts": 24}, "granularity of 24 does not divide ffn_hidden_size 12; use 12"),
        (
            3,
            {"num_experts": 4, "moe_router_topk": 3},
            "granularity of 3 does not divide num_experts 4; use a multiple of 3, such as 3 or 6",
        ),
        (
            3,
            {"num_experts": 6, "moe_router_topk": 4},
            "granularity of 3 does not divide moe_router_topk 4; use a multiple of 3",
        ),
        (
            3,
            {
                "num_experts": 12,
                "moe_router_topk": 3,
                "moe_router_num_groups": 3,
                "moe_router_group_topk": 1,
            },
            "granularity of 3 does not divide the experts of a group; use a multiple of 3",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused(granularity, changes, words):
    with pytest.raises(ConfigError) as caught:
        upcycled_config(DENSE, granularity, changes)
    assert words in str(caught.value)


def test_models_that_have_or_cannot_have_experts_are_refused():
    with pytest.raises(ConfigError, match="has num_experts 2 already; give a dense model"):
        upcycled_config(replace(DENSE, num_experts=2), 1, {"num_experts": 4})
    mamba = MambaModelConfig(**SIZES, mamba_num_groups=1, mamba_head_dim=4)
    with pytest.raises(ConfigError, match="kind 'mamba' cannot have experts; give another model"):
        upcycled_config(mamba, 1, {"num_experts": 4})


def test_the_finest_granularity_and_groups_of_several_slices_are_accepted():
    finest = upcycled_config(DENSE, 12, {"num_experts": 12, "moe_router_topk": 12})
    assert finest.moe_ffn_hidden_size == 1
    groups = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2}
    found = upcycled_config(DENSE, 2, {"num_experts": 8, **groups})
    assert found.moe_ffn_hidden_size == 6 and found.moe_router_num_groups == 2
