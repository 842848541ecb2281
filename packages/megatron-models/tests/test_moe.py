"""Layers with experts on one rank: a loop over tokens, padding, sinks and both losses."""

import pytest
import torch
from megatron_kernels import Mask, swiglu
from megatron_models import GPT, ConfigError, Placement, parameter_count, training_flops
from megatron_models.components.context import Context
from megatron_models.components.moe.module import MoE
from megatron_models.parameters import stored_shapes
from megatron_parallel import AuxiliaryLosses, Mesh, collect_shardings
from torch.nn import functional

EXPERTS = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
GATED = {"activation": "swiglu", "add_bias_linear": False}


def built(config, **options):
    """Returns a float64 model with large weights."""
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float64, **options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def tokens_of(config):
    return torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_layer_is_a_weighted_sum_over_the_best_experts(small, gated, dispatcher):
    config = small(**EXPERTS, **(GATED if gated else {}), moe_shared_expert_intermediate_size=8)
    layer = built(config, dispatcher=dispatcher).layers["0"].mlp
    assert isinstance(layer, MoE)
    x = torch.randn(5, 2, config.hidden_size, dtype=torch.float64)
    expected = layer.shared(x)
    up, down = layer.experts.up, layer.experts.down
    for indices, token in (
        (p, x[p]) for p in torch.cartesian_prod(torch.arange(5), torch.arange(2))
    ):
        indices = tuple(indices.tolist())
        token = x[indices]
        scores = layer.router.weight @ token
        best = scores.argsort(descending=True)[:2]
        for share, e in zip(torch.softmax(scores[best], 0), best, strict=True):
            y = torch.tensordot(up.weight[e], token, dims=([-1], [0]))
            y = y if up.bias is None else y + up.bias[e]
            y = swiglu(y) if gated else functional.gelu(y)
            y = down.weight[e] @ y
            y = y if down.bias is None else y + down.bias[e]
            expected = expected.index_put(
                tuple(torch.tensor(p) for p in indices), share * y, accumulate=True
            )
    found = layer(x, Context(Mask()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_rows_of_no_expert_give_zeros_and_do_not_change_others(small):
    """Biases are not added to them: in the first layer they would become inputs of the second."""
    experts = built(small(**EXPERTS)).layers["0"].mlp.experts
    assert all(layer.bias.any() for layer in (experts.up, experts.down))
    rows = torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([2, 0, 1, 1, 0, 1])
    found = experts(rows, counts, True)
    assert not found[5:].any()
    torch.testing.assert_close(found[:5], experts(rows[:5], counts), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_padding_does_not_affect_tokens_and_is_not_counted(small, kind):
    """Gradients and losses are those of the same sequences without padding."""
    config = small(**EXPERTS, **LOSSES, moe_router_load_balancing_type=kind)
    tokens, lengths = tokens_of(config), (9, 4, 6)
    ids = torch.zeros(3, 9, dtype=torch.int32)
    for row, length in enumerate(lengths):
        ids[row, length:] = -1
    count = sum(lengths)
    results = []
    for padding in (0, 37):  # other tokens in the padding
        model = built(config)
        auxiliary_losses = AuxiliaryLosses(dict.fromkeys(config.auxiliary_losses, count))
        text = torch.where(ids < 0, (tokens + padding) % config.vocab_size, tokens)
        losses = model(
            text, labels=tokens, mask=Mask(document_ids=ids), auxiliary_losses=auxiliary_losses
        )
        (losses * (ids >= 0)).sum().backward()
        results.append((auxiliary_losses.sums, {n: p.grad for n, p in model.named_parameters()}))
    (sums, grads), (other_sums, other_grads) = results
    for name, grad in grads.items():
        if "embedding.word" not in name:
            torch.testing.assert_close(grad, other_grads[name], rtol=0, atol=1e-13, msg=name)
    assert sums == other_sums
    name = "load_balancing_loss" if kind == "aux_loss" else "seq_load_balancing_loss"
    assert sums[name] / count >= 1


def test_losses_of_routers_reach_the_gradient(small):
    config = small(**EXPERTS, **LOSSES, num_layers=3, moe_layer_freq="[1,0,1]")
    tokens = tokens_of(config)

    def gradient(scale):
        model = built(config)
        auxiliary_losses = AuxiliaryLosses(
            dict.fromkeys(config.auxiliary_losses, tokens.numel() / scale)
        )
        model(tokens, labels=tokens, auxiliary_losses=auxiliary_losses).sum().backward()
        return model.get_parameter("layers.0.mlp.router.weight").grad, auxiliary_losses.sums

    (one, sums), (two, _), (three, _) = (gradient(scale) for scale in (1.0, 2.0, 3.0))
    torch.testing.assert_close(two - one, three - two)
    assert (two - one).abs().max() > 1e-3
    assert all(value > 0 for value in sums.values()) and len(sums) == 2


def test_reported_losses_are_means_over_the_layers_with_experts(small):
    """Their gradients are those of the sum over layers, each with its coefficient."""
    config = small(**EXPERTS, **LOSSES, num_layers=3, moe_layer_freq="[1,0,1]")
    tokens, model = tokens_of(config), built(config)
    inputs = {}
    for number in "02":
        model.layers[number].mlp.register_forward_pre_hook(
            lambda _, given, number=number: inputs.update({number: given[0].detach()})
        )

    def step(denominator):
        collected = AuxiliaryLosses(dict.fromkeys(config.auxiliary_losses, denominator))
        loss = model(tokens, labels=tokens, auxiliary_losses=collected).sum()
        weights = [model.layers[number].mlp.router.weight for number in "02"]
        return collected.sums, torch.autograd.grad(loss, weights)[1]

    count = tokens.numel()
    sums, gradient = step(count)
    _, without = step(torch.inf)
    balancing, z, objective = [], [], 0.0
    last = model.layers["2"].mlp.router.weight.detach().requires_grad_()
    for number, weight in ("0", model.layers["0"].mlp.router.weight.detach()), ("2", last):
        logits = inputs[number].flatten(0, 1) @ weight.t()
        shares = logits.softmax(-1)
        chosen = functional.one_hot(logits.topk(2).indices, 6).sum((0, 1)) / (2 * count)
        balancing.append(6 * (chosen * shares.mean(0)).sum())
        z.append(logits.logsumexp(-1).square().mean())
        objective = objective + 0.3 * balancing[-1] + 0.2 * z[-1]
    torch.testing.assert_close(sums["load_balancing_loss"] / count, sum(balancing).detach() / 2)
    torch.testing.assert_close(sums["z_loss"] / count, sum(z).detach() / 2)
    (expected,) = torch.autograd.grad(objective, last)
    torch.testing.assert_close(gradient - without, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks_take_part_in_attention(small, kind):
    config, plain = small(softmax_type=kind), small()
    model, tokens = built(config), tokens_of(config)
    name = "layers.0.attention.sinks.weight"
    if kind == "learnable":
        table = collect_shardings(model)
        assert table[name].shape == (4,) and table[name].axis == "tp"
        assert not table[name].weight_decay
        model.loss(tokens, tokens).sum().backward()
        assert model.get_parameter(name).grad.abs().min() > 1e-6
        model.get_parameter(name).data.fill_(-1e6)
        model.get_parameter("layers.1.attention.sinks.weight").data.fill_(-1e6)
    weights = {n: p for n, p in model.state_dict().items() if "sinks" not in n}
    without = GPT(plain, Placement(Mesh.single(), dtype=torch.float64))
    without.load_state_dict(weights)
    same = torch.allclose(model.loss(tokens, tokens), without.loss(tokens, tokens), atol=1e-12)
    assert same == (kind == "learnable")


@pytest.mark.parametrize(
    "changes",
    [
        EXPERTS,
        {**EXPERTS, **GATED, "moe_shared_expert_intermediate_size": 8},
        {**EXPERTS, "moe_layer_freq": "2", "softmax_type": "learnable"},
        {
            **EXPERTS,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    ],
)
def test_names_and_shapes_are_known_without_the_model(small, changes):
    config = small(**changes)
    table = collect_shardings(GPT(config, Mesh.single()))
    assert {name: sharding.shape for name, sharding in table.items()} == stored_shapes(config)
    assert list(table) == list(stored_shapes(config))


def test_only_active_experts_are_counted(small):
    dense = small(ffn_hidden_size=40)
    routed = small(num_experts=6, moe_ffn_hidden_size=20, moe_router_topk=2)
    router = 2 * 6 * 24  # one weight in each of two layers
    assert training_flops(routed, 16) == training_flops(dense, 16)
    one_more = 2 * 24  # one more bias of `down` in each layer
    assert parameter_count(routed, active=True) == parameter_count(dense) + router + one_more
    assert parameter_count(routed) > parameter_count(routed, active=True)
    assert parameter_count(dense, active=True) == parameter_count(dense)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_aux_loss_coeff": 0.1}, "0.1 has no effect without experts; set num_experts"),
        ({**EXPERTS, "moe_router_topk": 7}, "moe_router_topk 7 must lie between 1 and num_exp"),
        ({**EXPERTS, "moe_layer_freq": "[1]*3"}, "has 3 layers, but the model has 2"),
        ({**EXPERTS, "moe_layer_freq": "[0]*2"}, "selects no layer for experts"),
        ({**EXPERTS, "moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff must be a number of at least 0"),
        (
            {**EXPERTS, "moe_router_enable_expert_bias": True},
            "moe_router_enable_expert_bias needs moe_router_score_function sigmoid or",
        ),
        (
            {
                **EXPERTS,
                "moe_router_score_function": "sigmoid",
                "moe_router_pre_softmax": True,
            },
            "moe_router_pre_softmax has no effect with moe_router_score_function sigmoid",
        ),
        (
            {**EXPERTS, "moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "none"},
            "has no effect with moe_router_load_balancing_type none",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(small, changes, message):
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)
