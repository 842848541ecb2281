"""Routers on one rank: selections, noise, replay, balance, and options that do not fit."""

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPT, ConfigError, Dropout, Placement, RouterReplay, StaticKVCache
from megatron_models.components.moe.router import Router
from megatron_models.components.moe.selection import sinkhorn
from megatron_models.components.moe.spec import MoESpec
from megatron_parallel import DropoutKey, Mesh, ParallelLayout, RecomputeConfig

EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
SIGMOID = {"moe_router_score_function": "sigmoid"}
PRE = {"moe_router_pre_softmax": True}
CHOICE = {**PRE, "moe_router_expert_choice": True}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}


def router(small, mesh=None, **changes):
    config = small(**{**EXPERTS, **changes})
    placement = Placement(mesh or Mesh.single(), dtype=torch.float64)
    found = Router(config.component(MoESpec), 3, placement)
    with torch.no_grad():
        found.weight.normal_(generator=torch.Generator().manual_seed(1))
    return found


def drawn(*shape, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def model(small, recompute=None, **changes):
    options = {} if recompute is None else {"recompute": recompute}
    placement = Placement(Mesh.single(), dtype=torch.float64, **options)
    return GPT(small(**{**EXPERTS, **changes}), placement)


def tokens_of(built):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(built.config.vocab_size, (3, 9), generator=generator)


def test_each_expert_selects_its_best_tokens(small):
    one = router(small, **CHOICE)
    x, routed = drawn(20, 24), torch.ones(20, dtype=torch.bool)
    routed[-4:] = False
    found = one(x, routed)
    scores = torch.softmax(x @ one.weight.T, -1)
    for expert in range(8):
        best = scores[:16, expert].argsort(descending=True)[:4].sort().values  # 16 * 2 / 8
        assert torch.equal((found.experts[:, expert] == expert).nonzero().flatten(), best)
        torch.testing.assert_close(found.weights[best, expert], scores[best, expert])


def test_a_model_whose_experts_select_tokens_does_not_generate(small):
    built = model(small, **CHOICE)
    tokens = tokens_of(built)
    later = tokens.clone()
    later[:, -3:] = (later[:, -3:] + 1) % built.config.vocab_size
    assert not torch.equal(built(tokens)[:6], built(later)[:6])  # the first tokens saw the last
    cache = StaticKVCache(built.config, Mesh.single(), 3, 9, torch.float64)
    with pytest.raises(ConfigError, match="moe_router_expert_choice cannot generate"):
        built(tokens, cache=cache)


def test_forced_balance_is_even(small):
    found = router(small, moe_router_force_load_balancing=True)(drawn(20, 24), None)
    assert found.experts.flatten().bincount(minlength=8).tolist() == [5] * 8


def test_forced_balance_continues_on_the_next_rank(small):
    """The 3 tokens of a second rank follow 3 tokens with 2 experts each."""
    mesh = Mesh(ParallelLayout(tp=2, dp=1), 1)
    found = router(small, mesh, moe_router_force_load_balancing=True)(drawn(3, 24), None)
    assert found.experts.tolist() == [[6, 7], [0, 1], [2, 3]]


@pytest.mark.parametrize(("layout", "share"), [({}, 2), ({"tp": 2}, 3), ({"tp": 2, "cp": 2}, 5)])
def test_experts_select_among_the_tokens_of_all_ranks_of_a_sequence(small, layout, share):
    """Of 5, 10 and 20 tokens, an expert of 8 selects 2 / 8, rounded up."""
    mesh = Mesh(ParallelLayout(**layout, dp=1), 0)
    assert router(small, mesh, **CHOICE).largest_share(5) == share


@pytest.mark.parametrize("changes", [{}, {**SIGMOID, "moe_router_topk": 3}, CHOICE])
def test_weights_of_compiled_code_are_those_of_a_gather(small, monkeypatch, changes):
    one, x = router(small, **changes), drawn(6, 24)
    plain = one(x, None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(one(x, None).weights, plain.weights)


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_a_factor_scales_the_weights(small, factor):
    x = drawn(6, 24)
    plain, scaled = router(small), router(small, moe_router_topk_scaling_factor=factor)
    assert torch.equal(scaled(x, None).weights, factor * plain(x, None).weights)


def test_sinkhorn_balances_in_training_only(small):
    one = router(small, **SINKHORN, **PRE)
    x = drawn(64, 24) + 0.3 * one.weight[0].detach()  # most tokens prefer expert 0
    loads = [one.train(on)(x, None).experts.flatten().bincount(minlength=8) for on in (True, False)]
    assert loads[0].max() < 32 < loads[1].max()


def test_sinkhorn_of_padding_alone_is_zero():
    padding = torch.zeros(4, dtype=torch.bool)
    axis = Mesh.single().axis("dp")
    assert sinkhorn(drawn(4, 3), padding, axis).tolist() == [[0.0] * 3] * 4


def test_sinkhorn_ends_once_the_factors_of_experts_stay(monkeypatch):
    """Equal logits are even after one round, for which ranks sum the load of experts once."""
    sums = []

    def alone(tensor, axis, *, purpose):
        sums.append(purpose)
        return tensor

    monkeypatch.setattr("megatron_models.components.moe.selection.all_reduce", alone)
    for tokens in (1, 5):
        sums.clear()
        logits, routed = torch.zeros(tokens, 4).double(), torch.ones(tokens, dtype=torch.bool)
        found = sinkhorn(logits, routed, Mesh.single().axis("dp"))
        torch.testing.assert_close(
            found, torch.full_like(found, 1 / (4 * tokens)), rtol=1e-6, atol=0
        )
        assert sums == ["routed tokens", "Sinkhorn loads"]


def test_sinkhorn_is_even_over_tokens_and_experts():
    """The result is the exponential of the logits times a factor of each token and each expert."""
    logits, axis = drawn(12, 4), Mesh.single().axis("dp")
    routed = torch.arange(12) < 9
    found = sinkhorn(logits, routed, axis)
    assert not found[9:].any()
    whole = torch.ones(9, dtype=torch.float64)
    torch.testing.assert_close(found.sum(0), whole[:4] / 4, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[:9].sum(1), whole / 9, rtol=1e-2, atol=0)
    factors = found[:9].log() - logits[:9]
    of_experts = factors - factors[:, :1]
    torch.testing.assert_close(of_experts, of_experts[:1].expand(9, -1))
    assert of_experts[0].abs().max() > 0.01
    torch.testing.assert_close(sinkhorn(logits + 1e4, routed, axis), found, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "changes", "logits", "weights"),
    [
        (torch.bfloat16, {}, torch.float32, torch.float32),
        (torch.float32, {}, torch.float32, torch.float32),
        (torch.float64, {}, torch.float64, torch.float64),
        (torch.bfloat16, {"moe_router_dtype": "fp64"}, torch.float64, torch.float32),
        (torch.float32, {"moe_router_dtype": "fp64"}, torch.float64, torch.float32),
    ],
)
def test_logits_have_the_precision_of_the_router(small, dtype, changes, logits, weights):
    spec = small(**EXPERTS, **changes).component(MoESpec)
    one = Router(spec, 0, Placement(Mesh.single(), dtype=dtype))
    torch.nn.init.ones_(one.weight)
    found = one(torch.ones(2, 24, dtype=dtype), None)
    assert (found.logits.dtype, found.weights.dtype) == (logits, weights)


def test_a_bias_rises_below_the_mean_load_and_falls_above_it(small):
    biased = {**SIGMOID, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01}
    one = router(small, **biased, num_experts=6)
    before = torch.arange(6).double() / 10
    after = one.update_bias(before, torch.tensor([3.0, 9.0, 0.0, 4.0, 4.0, 4.0]))
    moved = [0.01, -0.01, 0.01, 0.0, 0.0, 0.0]
    assert (after - before).tolist() == pytest.approx(moved, abs=1e-12)


def test_noise_on_inputs_is_keyed_by_token_and_layer(small):
    one = router(small, moe_input_jitter_eps=0.25)
    ones = torch.ones(400, 24, dtype=torch.float64)
    key = DropoutKey.for_batch(seed=1, iteration=2, samples=torch.tensor([5]), positions=400)
    factors = one._jitter(ones, key)
    assert 0.75 <= factors.min() < 0.76 and 1.24 < factors.max() <= 1.25
    assert abs(factors.mean() - 1) < 0.01
    later = DropoutKey(key.word0[300:], key.word1[300:])
    assert torch.equal(one._jitter(ones[300:], later), factors[300:])
    one.dropout_layer = 4
    assert not torch.equal(one._jitter(ones, key), factors)


def test_noise_needs_a_key_and_training(small):
    built = model(small, moe_input_jitter_eps=0.5)
    tokens = tokens_of(built)
    key = DropoutKey.for_batch(seed=1, iteration=0, samples=torch.arange(3), positions=9)
    plain, noisy = built(tokens), built(tokens, dropout=Dropout(key))
    assert built.config.uses_noise and not torch.equal(plain, noisy)
    assert torch.equal(built.eval()(tokens, dropout=Dropout(key)), plain)


def test_biases_flatten_the_load_of_a_skewed_router(small):
    biased = {**SIGMOID, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.02}
    one = router(small, **biased)
    x = drawn(256, 24)
    x = 0.2 * (x + 0.2 * one.weight[:2].sum(0).detach())  # most tokens prefer experts 0 and 1
    loads = []
    for _ in range(80):
        found = one(x, None)
        loads.append(found.experts.flatten().bincount(minlength=8))
        found.weights.sum().backward()
        one.load.step()
    mean = 256 * 2 / 8
    assert loads[0].max() > 2 * mean and loads[0].min() < 0.5 * mean
    assert loads[-1].max() < 1.3 * mean and loads[-1].min() > 0.7 * mean


@pytest.mark.parametrize(
    "recompute",
    [
        None,
        RecomputeConfig(granularity="selective", modules=("moe",)),
        RecomputeConfig(granularity="full", method="uniform", num_layers=1),
    ],
    ids=["", "selective", "full"],
)
def test_a_replay_uses_the_recorded_experts(small, recompute):
    built = model(small, recompute, num_layers=3, moe_layer_freq="[1,0,1]")
    tokens, recorded, free = tokens_of(built), RouterReplay(), RouterReplay()
    built(tokens, labels=tokens, router_replay=recorded).sum().backward()
    assert {n: tuple(e.shape) for n, e in recorded.experts.items()} == {0: (3, 9, 2), 2: (3, 9, 2)}
    seen = []
    for layer in ("0", "2"):
        router = built.layers[layer].mlp.router
        router.weight.data.neg_()  # the best experts become the worst
        router.register_forward_hook(
            lambda module, given, found: seen.append((module.layer, found.experts))
        )
    built(tokens, router_replay=free)
    assert not torch.equal(free.experts[0], recorded.experts[0])
    seen.clear()
    built(tokens, labels=tokens, router_replay=recorded.replay()).sum().backward()
    assert len(seen) == (2 if recompute is None else 4)
    for layer, experts in seen:
        assert torch.equal(experts.view(9, 3, 2).transpose(0, 1), recorded.experts[layer])


@pytest.mark.parametrize("changes", [{}, CHOICE], ids=["tokens", "experts"])
def test_a_replay_has_the_output_of_the_recorded_pass(small, changes):
    """Padding was not routed, and is not when the recorded experts alone say so."""
    built = model(small, **changes)
    tokens, recorded = tokens_of(built), RouterReplay()
    ids = torch.zeros(3, 9, dtype=torch.int32)
    ids[1, 5:] = -1
    expected = built(tokens, mask=Mask(document_ids=ids), router_replay=recorded)
    assert (recorded.experts[0][1, 5:] == -1).all() and (recorded.experts[1][0] >= 0).any()
    masked = built(tokens, mask=Mask(document_ids=ids), router_replay=recorded.replay())
    torch.testing.assert_close(masked, expected, rtol=0, atol=1e-12)
    plain = built(tokens, router_replay=recorded.replay())
    torch.testing.assert_close(plain[:, [0, 2]], expected[:, [0, 2]], rtol=0, atol=1e-12)
    torch.testing.assert_close(plain[:5, 1], expected[:5, 1], rtol=0, atol=1e-12)


def test_a_replay_that_does_not_fit_is_refused(small):
    built = model(small)
    tokens, recorded = tokens_of(built), RouterReplay()
    built(tokens, router_replay=recorded)
    off_by_one = RouterReplay({layer + 1: e for layer, e in recorded.experts.items()})
    with pytest.raises(ConfigError, match="no experts of layer 0, only of layers 1, 2"):
        built(tokens, router_replay=off_by_one)
    with pytest.raises(ConfigError, match=r"shape \[3, 9, 2\] for layer 0, not \[3, 8, 2\]"):
        built(tokens[:, :8], router_replay=recorded.replay())
    with pytest.raises(ConfigError, match="already has other experts of layer 0"):
        built((tokens + 1) % built.config.vocab_size, router_replay=recorded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_num_groups": 4}, "moe_router_num_groups 4 and moe_router_group_topk 0 need"),
        ({**GROUPS, "moe_router_num_groups": 3}, "does not divide num_experts 8; use 2"),
        ({**GROUPS, "moe_router_group_topk": 4}, "less than moe_router_num_groups 4, or groups"),
        (
            {**GROUPS, "moe_router_topk": 5},
            "groups of 2 experts have fewer experts than moe_router_topk 5; use 3 groups",
        ),
        ({**GROUPS, "moe_router_group_score_topk": 3}, "3 exceeds the 2 experts of a group; use 2"),
        ({"moe_router_group_score_topk": 1}, "1 has no effect without groups"),
        ({"moe_router_norm_topk_prob": "yes"}, "no effect on a softmax over the selected experts"),
        ({**SIGMOID, "moe_router_norm_topk_prob": "yes"}, "yes is the default with"),
        ({**PRE, "moe_router_norm_topk_prob": "no"}, "no is the default with"),
        ({"moe_router_bias_update_rate": 0.5}, "0.5 has no effect without a bias; add"),
        ({**SINKHORN}, "softmax over all experts; add moe_router_pre_softmax"),
        ({**SINKHORN, "moe_router_topk": 1}, "set moe_router_score_function sigmoid"),
        (
            {**SINKHORN, **PRE, "moe_seq_aux_loss_coeff": 0.1},
            "coeff 0.1 does not work with",
        ),
        ({**SINKHORN, **PRE, **GROUPS}, "moe_router_num_groups 4 has no effect with"),
        ({**SINKHORN, **CHOICE}, "exclude each other"),
        ({"moe_router_expert_choice": True}, "needs scores of all experts; add"),
        ({**CHOICE, "moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff 0.1 has no effect with"),
        (
            {"moe_router_load_balancing_type": "seq_aux_loss", "moe_seq_aux_loss_coeff": 0.1},
            "moe_seq_aux_loss_coeff 0.1 is the weight of the loss that",
        ),
        ({"moe_input_jitter_eps": 1.0}, "moe_input_jitter_eps 1.0 must be below 1"),
        ({"moe_shared_expert_gate": True}, "no effect without a shared expert; set moe_shared"),
    ],
)
def test_options_that_do_not_fit_are_refused(small, changes, message):
    with pytest.raises(ConfigError) as caught:
        small(**{**EXPERTS, **changes})
    assert message in str(caught.value) and "\n" not in str(caught.value)
