"""Scores, selections and weights of routers equal those of megatron-core and transformers."""

import types
from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPTConfig, Placement
from megatron_models.components.context import Context
from megatron_models.components.moe.losses import RouterLosses
from megatron_models.components.moe.module import MoE
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.routing import Routing
from megatron_models.components.moe.selection import sinkhorn
from megatron_models.components.moe.spec import MoESpec
from megatron_parallel import AuxiliaryLosses, Mesh
from torch import Tensor

N, E, HIDDEN, WIDTH = 40, 8, 16, 20
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}
PRE = {"moe_router_pre_softmax": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}


def spec(**changes: object) -> MoESpec:
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
    return GPTConfig(**(values | changes)).component(MoESpec)  # type: ignore[arg-type]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def built(bias: Tensor | None = None, **changes: object) -> Router:
    """Returns a router whose logits are the first entries of its input."""
    router = Router(spec(**changes), 0, Placement(Mesh.single(), dtype=torch.float64))
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, HIDDEN))
        if bias is not None:
            router.expert_bias.copy_(bias)
    return router


def tokens(logits: Tensor) -> Tensor:
    return torch.cat([logits, torch.zeros(len(logits), HIDDEN - E, dtype=logits.dtype)], 1)


def dense(found: Routing) -> Tensor:
    """Returns the weights of all experts, 0 for those that are not selected."""
    empty = torch.zeros(found.logits.shape, dtype=torch.float64)
    return empty.scatter(1, found.experts, found.weights)


@pytest.mark.parametrize(
    "changes",
    [
        {**SIGMOID, **GROUPS, "moe_router_topk": 4},
        {**BIASED, **GROUPS, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5},
        {**BIASED, **GROUPS, "moe_router_topk": 2},  # the score of a group is its maximum
        {**PRE, **GROUPS, "moe_router_topk": 3, "moe_router_topk_scaling_factor": 16.0},
        {**GROUPS, "moe_router_topk": 4},
        {**PRE, "moe_router_topk": 2, "moe_router_topk_scaling_factor": 0.5},
    ],
)
def test_groups_and_factors_equal_megatrons(changes: dict[str, Any]) -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = drawn(N, E)
    biased = changes.get("moe_router_enable_expert_bias", False)
    bias = 0.4 * drawn(E, seed=3) if biased else None
    found = built(bias, **changes)(tokens(logits), None)
    limited = "moe_router_num_groups" in changes
    weights, chosen = moe_utils.topk_routing_with_score_function(
        logits,
        changes["moe_router_topk"],
        use_pre_softmax=changes.get("moe_router_pre_softmax", False),
        num_groups=4 if limited else None,
        group_topk=2 if limited else None,
        scaling_factor=changes.get("moe_router_topk_scaling_factor"),
        score_function=changes.get("moe_router_score_function", "softmax"),
        expert_bias=bias,
    )
    assert torch.equal(torch.zeros(N, E).scatter(1, found.experts, 1).bool(), chosen.bool())
    torch.testing.assert_close(dense(found), weights, rtol=1e-6, atol=1e-6)
    restricted = found.experts.sort().values != found.unrestricted_experts.sort().values
    assert restricted.any() == (limited or biased)


def deepseek_v3(**changes: object) -> Any:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    values = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2} | changes
    config = deepseek.DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=E, **values)
    return deepseek.DeepseekV3TopkRouter(config)


@pytest.mark.parametrize("norm", [True, False])
def test_the_router_equals_deepseek_v3s(norm: bool) -> None:
    theirs = deepseek_v3(norm_topk_prob=norm, routed_scaling_factor=2.5).double()
    changes = {} if norm else {"moe_router_norm_topk_prob": "no"}
    bias = 0.3 * drawn(E, seed=3)
    router = built(
        bias,
        **BIASED,
        **GROUPS,
        **changes,
        moe_router_topk=3,
        moe_router_group_score_topk=2,
        moe_router_topk_scaling_factor=2.5,
    )
    with torch.no_grad():
        theirs.weight.copy_(router.weight)
        theirs.e_score_correction_bias.copy_(bias)
    x = tokens(drawn(N, E))
    found, (_, weights, experts) = router(x, None), theirs(x)
    expected = torch.zeros(N, E, dtype=torch.float64).scatter(1, experts, weights.double())
    torch.testing.assert_close(dense(found), expected, rtol=1e-6, atol=1e-6)


def test_the_group_score_of_deepseek_v2_is_a_maximum() -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = deepseek.DeepseekV2Config(
        num_attention_heads=2,
        hidden_size=HIDDEN,
        n_routed_experts=E,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
    )
    theirs = deepseek.DeepseekV2TopkRouter(config).double()
    router = built(
        **PRE,
        **GROUPS,
        moe_router_topk=3,
        moe_router_group_score_topk=1,
        moe_router_topk_scaling_factor=4.0,
    )
    with torch.no_grad():
        theirs.weight.copy_(router.weight)
    x = tokens(drawn(N, E))
    *_, weights, experts = theirs(x[None])
    expected = torch.zeros(N, E, dtype=torch.float64).scatter(
        1, experts.view(N, -1), weights.view(N, -1).double()
    )
    torch.testing.assert_close(dense(router(x, None)), expected, rtol=1e-6, atol=1e-6)


def test_the_router_equals_gpt_oss() -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = gpt_oss.GptOssConfig(hidden_size=HIDDEN, num_local_experts=E, num_experts_per_tok=3)
    theirs = gpt_oss.GptOssTopKRouter(config).double()
    router = built(moe_router_topk=3, moe_router_add_bias=True)
    assert router.bias is not None
    with torch.no_grad():
        router.bias.copy_(drawn(E, seed=3))
        theirs.weight.copy_(router.weight)
        theirs.bias.copy_(router.bias)
    x = tokens(drawn(N, E))
    found, (_, weights, experts) = router(x, None), theirs(x)
    assert torch.equal(found.experts, experts)
    torch.testing.assert_close(found.weights, weights)


@pytest.mark.parametrize("normalized", [True, False])
def test_the_layer_equals_qwen2_moes(normalized: bool) -> None:
    """The shared expert has a gate, and the scores are normalized or not."""
    qwen = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    theirs = qwen.Qwen2MoeSparseMoeBlock(
        qwen.Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=WIDTH,
            shared_expert_intermediate_size=12,
            num_experts=E,
            num_experts_per_tok=3,
            norm_topk_prob=normalized,
            experts_implementation="eager",
        )
    ).double()
    changes = {
        "moe_router_topk": 3,
        "moe_router_pre_softmax": not normalized,
        "moe_shared_expert_intermediate_size": 12,
        "moe_shared_expert_gate": True,
    }
    ours = MoE(spec(**changes), 0, Placement(Mesh.single(), dtype=torch.float64))
    shared = theirs.shared_expert
    weights = {
        "router.weight": [theirs.gate.weight],
        "experts.up.weight": [theirs.experts.gate_up_proj],
        "experts.down.weight": [theirs.experts.down_proj],
        "shared.up.weight": [shared.gate_proj.weight, shared.up_proj.weight],
        "shared.down.weight": [shared.down_proj.weight],
        "shared_gate.weight": [theirs.shared_expert_gate.weight],
    }
    assert sorted(weights) == sorted(name for name, _ in ours.named_parameters())
    with torch.no_grad():
        for number, (name, parts) in enumerate(weights.items()):
            values = drawn(*ours.get_parameter(name).shape, seed=number)
            ours.get_parameter(name).copy_(values)
            for part, value in zip(parts, values.chunk(len(parts)), strict=True):
                part.copy_(value.view(part.shape))
    x = drawn(6, 2, HIDDEN, seed=11)
    expected = theirs(x.transpose(0, 1).contiguous()).transpose(0, 1)
    torch.testing.assert_close(ours(x, Context(Mask())), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_layer_equals_llama_4s(top_k: int) -> None:
    """Weights are sigmoids without normalization, and multiply the inputs of experts."""
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    theirs = llama4.Llama4TextMoe(
        llama4.Llama4TextConfig(
            hidden_size=HIDDEN,
            intermediate_size=WIDTH,
            num_local_experts=E,
            num_experts_per_tok=top_k,
        )
    ).double()
    changes = {
        **SIGMOID,
        "moe_router_topk": top_k,
        "moe_router_norm_topk_prob": "auto" if top_k == 1 else "no",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": WIDTH,
    }
    ours = MoE(spec(**changes), 0, Placement(Mesh.single(), dtype=torch.float64))
    shared = theirs.shared_expert
    with torch.no_grad():
        for number, parameter in enumerate(ours.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number))
        up, down = ours.experts.up.weight, ours.experts.down.weight
        assert ours.shared is not None
        theirs.router.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(up.flatten(1, 2).transpose(1, 2))
        theirs.experts.down_proj.copy_(down.transpose(1, 2))
        shared.gate_proj.weight.copy_(ours.shared.up.weight[0])
        shared.up_proj.weight.copy_(ours.shared.up.weight[1])
        shared.down_proj.weight.copy_(ours.shared.down.weight)
    x = drawn(6, 2, HIDDEN, seed=11)
    expected = theirs(x.transpose(0, 1).contiguous())[0].view(2, 6, HIDDEN).transpose(0, 1)
    torch.testing.assert_close(ours(x, Context(Mask())), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_equals_megatrons(top_k: int) -> None:
    router_module = pytest.importorskip("megatron.core.transformer.moe.router")
    logits = drawn(N, E)
    router = built(
        moe_router_load_balancing_type="sinkhorn",
        moe_router_topk=top_k,
        **(SIGMOID if top_k == 1 else PRE),
    )
    axis = Mesh.single().axis("tp")
    even = router_module.sinkhorn(logits)
    torch.testing.assert_close(
        sinkhorn(logits, torch.ones(N, dtype=torch.bool), axis), even, rtol=1e-3, atol=1e-6
    )
    for training in (True, False):
        router.train(training)
        config = types.SimpleNamespace(moe_aux_loss_coeff=0)
        theirs = types.SimpleNamespace(config=config, topk=top_k, training=training)
        scores, _ = router_module.TopKRouter.sinkhorn_load_balancing(theirs, logits)
        found = dense(router(tokens(logits), None))
        torch.testing.assert_close(found, scores, rtol=1e-6, atol=1e-6)


def test_the_loss_of_a_step_equals_megatrons() -> None:
    """Each micro-batch counts the selections of all micro-batches so far."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    router = built(moe_global_aux_loss_coeff=0.5)
    losses = RouterLosses(router.spec, 0, Mesh.single())
    name = "global_load_balancing_loss"
    collected = AuxiliaryLosses({name: 3 * N})
    sequences = torch.zeros(N, dtype=torch.int64)
    total, expected = torch.zeros(E), torch.zeros((), dtype=torch.float64)
    for number in range(3):
        context = Context(Mask(), auxiliary_losses=collected)
        logits = (drawn(N, E, seed=number) + number * torch.eye(E)[0]).requires_grad_()
        found = router(tokens(logits), None)
        for _ in range(2):  # a recomputation does not count again
            weights = losses.attach(found, sequences, 1, context)
        (gradient,) = torch.autograd.grad(weights.sum() * 0, logits)
        total += found.experts.flatten().bincount(minlength=E)
        probabilities = torch.softmax(logits, -1)
        value = moe_utils.switch_load_balancing_loss_func(
            probabilities, total / (number + 1), N, 2, E, 0.5
        )
        (reference,) = torch.autograd.grad(value / 3, logits)
        torch.testing.assert_close(gradient, reference)
        expected += value.detach() / 0.5 / 3
    torch.testing.assert_close(collected.sums[name] / (3 * N), expected)
