"""The capacity of experts on one rank, compared with a loop over tokens and experts."""

from math import ceil

import pytest
import torch
from megatron_kernels import Mask, gelu
from megatron_models import GPT, ConfigError, Placement
from megatron_models.components.context import Context
from megatron_models.components.moe.capacity import kept_choices
from megatron_models.components.moe.module import MoE
from megatron_parallel import Mesh

EXPERTS = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
LENGTH, SAMPLES = 7, 3


def layer(config, dispatcher="allgather") -> MoE:
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float64, dispatcher=dispatcher))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.layers["0"].mlp


def stream(config):
    generator = torch.Generator().manual_seed(5)
    shape = (LENGTH, SAMPLES, config.hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def looped(moe, x, capacity, policy, padding):
    """Returns the output of a plain loop, and the number of choices that were dropped."""
    requests = {e: [] for e in range(6)}
    for s in range(LENGTH):
        for b in range(SAMPLES):
            if padding[s, b]:
                continue
            scores = moe.router.weight @ x[s, b]
            best = scores.argsort(descending=True)[:2]
            for weight, e in zip(torch.softmax(scores[best], 0), best.tolist(), strict=True):
                requests[e].append((s, b, weight))
    y, dropped = torch.zeros_like(x), 0
    up, down = moe.experts.up, moe.experts.down
    for e, tokens in requests.items():
        if policy == "probs":
            tokens = sorted(tokens, key=lambda token: -float(token[2].detach()))
        dropped += len(tokens[capacity:])
        for s, b, weight in tokens[:capacity]:
            inner = gelu(up.weight[e] @ x[s, b] + up.bias[e])
            out = weight * (down.weight[e] @ inner + down.bias[e])
            y = y.index_put((torch.tensor(s), torch.tensor(b)), out, accumulate=True)
    return y, dropped


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 0.8])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_an_expert_drops_what_a_loop_over_tokens_drops(small, pad, policy, factor, dispatcher):
    config = small(
        **EXPERTS,
        moe_expert_capacity_factor=factor,
        moe_token_drop_policy=policy,
        moe_pad_expert_input_to_capacity=pad,
    )
    moe, x = layer(config, dispatcher), stream(config)
    padding = torch.zeros(LENGTH, SAMPLES, dtype=torch.bool)
    padding[4:, 1] = True
    capacity = ceil(LENGTH * SAMPLES * 2 * factor / 6)
    counts = []
    moe.experts.register_forward_hook(lambda module, given, y: counts.append(given[1].tolist()))
    found = moe(x, Context(Mask(), padding=padding))
    expected, dropped = looped(moe, x, capacity, policy, padding)
    assert dropped > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert counts == [[capacity] * 6] if pad else max(counts[0]) == capacity
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    inputs = [x, *moe.parameters()]
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for mine, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-11)


def test_equal_weights_are_kept_in_the_order_of_their_indices():
    experts = torch.tensor([[0], [0], [1], [0], [-1]])
    weights = 0.3 + 1e-8 * torch.arange(5).view(5, 1)
    indices = torch.tensor([4, 0, 1, 2, 3])
    for by_weight in (False, True):
        kept = kept_choices(experts, weights, indices, capacity=2, by_weight=by_weight)
        assert kept.flatten().tolist() == [False, True, True, True, False]


def test_without_a_capacity_empty_experts_and_uneven_loads_equal_a_loop(small):
    config = small(**EXPERTS)
    moe, x = layer(config), stream(config)
    with torch.no_grad():
        factors = torch.tensor([3.0, 2, 1, -1, -2, -3], dtype=torch.float64)
        moe.router.weight.copy_(factors[:, None] * moe.router.weight[0])
    padding = torch.zeros(LENGTH, SAMPLES, dtype=torch.bool)
    padding[5:] = True
    counts = []
    moe.experts.register_forward_hook(lambda module, given, y: counts.append(given[1].tolist()))
    found = moe(x, Context(Mask(), padding=padding))
    expected, dropped = looped(moe, x, LENGTH * SAMPLES, "position", padding)
    assert dropped == 0 and counts[0][2:4] == [0, 0] and max(counts[0]) > 8
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_token_drop_policy": "position"}, "no effect without moe_expert_capacity_factor"),
        ({"moe_pad_expert_input_to_capacity": True}, "give a factor such as 1.0"),
        (
            {
                "moe_expert_capacity_factor": 1.0,
                "moe_router_expert_choice": True,
                "moe_router_pre_softmax": True,
            },
            "moe_expert_capacity_factor 1.0 does not work with moe_router_expert_choice",
        ),
        ({"moe_expert_capacity_factor": -1.0}, "moe_expert_capacity_factor must be a number of"),
    ],
)
def test_settings_without_effect_are_refused(small, changes, message):
    with pytest.raises(ConfigError, match=message):
        small(**EXPERTS, **changes)
