"""Our mixture of experts equals those of transformers and megatron-core."""

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPTConfig, Placement
from megatron_models.components.context import Context
from megatron_models.components.moe.losses import load_balancing_loss, z_loss
from megatron_models.components.moe.module import MoE
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.routing import Routing
from megatron_models.components.moe.spec import MoESpec
from megatron_parallel import Mesh
from torch import Tensor

N, E, HIDDEN, WIDTH = 24, 6, 16, 20
ALONE = Mesh.single().axis("tp")


def config(**changes: object) -> GPTConfig:
    values: dict[str, object] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 8,
        "num_experts": E,
        "moe_ffn_hidden_size": WIDTH,
        "activation": "swiglu",
        "add_bias_linear": False,
    }
    return GPTConfig(**(values | changes))  # type: ignore[arg-type]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_the_layer_equals_mixtrals(dispatcher: str) -> None:
    """Compares in float64; their router rounds its softmax to float32."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    theirs = mixtral.MixtralSparseMoeBlock(
        mixtral.MixtralConfig(
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_local_experts=E,
            num_experts_per_tok=2,
            experts_implementation="eager",
        )
    ).double()
    placement = Placement(Mesh.single(), dtype=torch.float64, dispatcher=dispatcher)
    ours = MoE(config().component(MoESpec), 0, placement)
    weights = {
        "router.weight": (theirs.gate.weight, drawn(E, HIDDEN)),
        "experts.up.weight": (theirs.experts.gate_up_proj, drawn(E, 2, WIDTH, HIDDEN, seed=2)),
        "experts.down.weight": (theirs.experts.down_proj, drawn(E, HIDDEN, WIDTH, seed=3)),
    }
    assert sorted(weights) == sorted(name for name, _ in ours.named_parameters())
    with torch.no_grad():
        for name, (other, values) in weights.items():
            ours.get_parameter(name).copy_(values)
            other.copy_(values.view(other.shape))
    x, gradient = drawn(8, 3, HIDDEN, seed=4), drawn(8, 3, HIDDEN, seed=5).detach()
    context = Context(Mask())
    y = ours(x, context)
    expected = theirs(x.transpose(0, 1).contiguous()).transpose(0, 1)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert y.std() > 1
    (dx,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
    (expected_dx,) = torch.autograd.grad(expected, x, gradient, retain_graph=True)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-6, atol=1e-5)
    for name, (other, _) in weights.items():
        own = torch.autograd.grad(y, ours.get_parameter(name), gradient, retain_graph=True)[0]
        their = torch.autograd.grad(expected, other, gradient, retain_graph=True)[0]
        assert own.abs().max() > 0.1
        torch.testing.assert_close(own, their.view(own.shape), rtol=1e-6, atol=1e-5, msg=name)


def routed(
    logits: Tensor, topk: int, pre_softmax: bool = False, bias: Tensor | None = None, **more: object
) -> Routing:
    """Returns the routing of given logits."""
    more |= {"moe_router_topk": topk, "moe_router_pre_softmax": pre_softmax}
    if bias is not None:
        more["moe_router_enable_expert_bias"] = True
    changed = config(hidden_size=E * 2, **more)
    placement = Placement(Mesh.single(), dtype=torch.float64)
    router = Router(changed.component(MoESpec), 0, placement)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, 2 * E))
        if bias is not None:
            router.expert_bias.copy_(bias)
    found: Routing = router(torch.cat([logits, torch.zeros_like(logits)], 1), None)
    return found


@pytest.mark.parametrize(("topk", "pre"), [(2, False), (3, True), (1, True)])
def test_choices_and_weights_equal_megatrons(topk: int, pre: bool) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = drawn(N, E).detach()
    found = routed(logits, topk, pre)
    probabilities, chosen = moe_utils.topk_routing_with_score_function(
        logits, topk, use_pre_softmax=pre
    )
    assert torch.equal(torch.zeros(N, E).scatter(1, found.experts, 1).bool(), chosen.bool())
    dense = torch.zeros(N, E, dtype=torch.float64).scatter(1, found.experts, found.weights)
    torch.testing.assert_close(dense, probabilities, rtol=0, atol=1e-7)  # theirs is in float32


BIAS = 0.3 * drawn(E, seed=9).detach()


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "biased"])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_sigmoid_choices_and_weights_equal_megatrons(topk: int, bias: Tensor | None) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = drawn(N, E).detach()
    found = routed(logits, topk, bias=bias, moe_router_score_function="sigmoid")
    probabilities, chosen = moe_utils.topk_routing_with_score_function(
        logits, topk, score_function="sigmoid", expert_bias=bias
    )
    assert torch.equal(torch.zeros(N, E).scatter(1, found.experts, 1).bool(), chosen.bool())
    dense = torch.zeros(N, E, dtype=torch.float64).scatter(1, found.experts, found.weights)
    torch.testing.assert_close(dense, probabilities, rtol=0, atol=1e-7)  # theirs is in float32
    assert torch.equal(found.experts, found.unrestricted_experts) == (bias is None)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "biased"])
def test_the_sigmoid_loss_of_the_router_equals_megatrons(bias: Tensor | None) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = drawn(N, E)
    found = routed(logits, 2, bias=bias, moe_router_score_function="sigmoid")
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid")
    expected = moe_utils.switch_load_balancing_loss_func(scores, chosen.sum(0), N, 2, E, 1.0)
    groups = torch.zeros(N, dtype=torch.int64)
    value = load_balancing_loss(found, groups, 1, ALONE, "sigmoid") / N
    torch.testing.assert_close(value.to(expected.dtype), expected)  # 0.19 gives it in float32


def test_biases_are_updated_as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tokens, group: None)
    state = moe_utils.parallel_state
    monkeypatch.setattr(state, "get_tensor_and_data_parallel_group", lambda **kind: None)
    changed = config(
        hidden_size=E * 2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
    )
    router = Router(changed.component(MoESpec), 0, Placement(Mesh.single(), dtype=torch.float64))
    tokens = torch.tensor([3.0, 9, 0, 4, 4, 4])  # the mean is 4
    with torch.no_grad():
        router.expert_bias.copy_(BIAS)
    expected = moe_utils.get_updated_expert_bias(tokens, BIAS, 0.01)
    torch.testing.assert_close(router.update_bias(router.expert_bias, tokens), expected)
    assert ((expected - BIAS).sign() == torch.tensor([1, -1, 1, 0, 0, 0])).all()


@pytest.mark.parametrize("topk", [1, 2])
def test_losses_of_the_router_equal_megatrons(topk: int) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = drawn(N, E)
    found = routed(logits, topk, pre_softmax=True)
    groups = torch.zeros(N, dtype=torch.int64)
    counts = found.experts.flatten().bincount(minlength=E)
    expected = moe_utils.switch_load_balancing_loss_func(
        torch.softmax(logits, -1), counts, N, topk, E, 1.0
    )
    value = load_balancing_loss(found, groups, 1, ALONE) / N
    torch.testing.assert_close(value, expected)
    assert value > 1
    for ours, theirs in (
        (value, expected),
        (z_loss(found) / N, moe_utils.z_loss_func(logits, 1.0)),
    ):
        torch.testing.assert_close(ours, theirs)
        gradients = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (ours, theirs)]
        torch.testing.assert_close(*gradients)
    by_sequence = load_balancing_loss(found, torch.arange(N) % 3, 3, ALONE) / N
    each = [
        moe_utils.switch_load_balancing_loss_func(
            torch.softmax(logits[i::3], -1),
            found.experts[i::3].flatten().bincount(minlength=E),
            N // 3,
            topk,
            E,
            1.0,
        )
        for i in range(3)
    ]
    torch.testing.assert_close(by_sequence, torch.stack(each).mean())
