"""Numbers of routers by hand: selections, capacity, losses of padding, reports, features."""

import math

import pytest
import torch
from megatron_models import ConfigError, RouterReplay
from megatron_models.components.moe.capacity import STEP, kept_choices
from megatron_models.components.moe.losses import load_balancing_loss, routing_counts, z_loss
from megatron_models.components.moe.measures import routing_measures
from megatron_models.components.moe.routing import Routing
from megatron_models.components.moe.selection import balanced_experts, tokens_of_experts
from megatron_models.components.moe.spec import MoESpec
from megatron_parallel import Mesh

EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 12}
SIGMOID = {"moe_router_score_function": "sigmoid"}
PRE = {"moe_router_pre_softmax": True}
AXIS = Mesh.single().axis("tp")


def spec(small, **changes):
    return small(**{**EXPERTS, **changes}).component(MoESpec)


def routing(logits, experts, unrestricted=None):
    """Returns a routing whose weights are 1."""
    experts = torch.tensor(experts)
    best = experts if unrestricted is None else torch.tensor(unrestricted)
    return Routing(experts, torch.ones(experts.shape).double(), torch.tensor(logits).double(), best)


@pytest.mark.parametrize(
    ("top_k", "group_topk", "best"), [(2, 1, 2), (3, 2, 1), (4, 2, 2), (2, 3, 1), (1, 2, 1)]
)
def test_the_score_of_a_group_sums_the_share_of_a_token_in_it(small, top_k, group_topk, best):
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": group_topk}
    assert spec(small, moe_router_topk=top_k, **groups).moe_router_group_score_topk == best


@pytest.mark.parametrize(
    ("changes", "normalizes", "softmax"),
    [
        ({}, False, True),
        (PRE, False, False),
        ({**PRE, "moe_router_norm_topk_prob": "yes"}, True, False),
        (SIGMOID, True, False),
        ({**SIGMOID, "moe_router_topk": 1}, False, False),
        ({**SIGMOID, "moe_router_topk": 1, "moe_router_norm_topk_prob": "yes"}, True, False),
        ({**SIGMOID, "moe_router_norm_topk_prob": "no"}, False, False),
        ({**SIGMOID, "moe_router_expert_choice": True}, False, False),
    ],
)
def test_scores_are_divided_by_their_sum_as_documented(small, changes, normalizes, softmax):
    found = spec(small, **changes)
    assert (found.normalizes_weights, found.softmax_of_selected) == (normalizes, softmax)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {**SIGMOID, "moe_router_topk": 1, "moe_router_norm_topk_prob": "no"},
            "moe_router_norm_topk_prob no is the default with moe_router_score_function sigmoid",
        ),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 2}, "use 1 or no groups"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 3}, "use 1 or no groups"),
        (
            {"moe_router_load_balancing_type": "global_aux_loss", "moe_global_aux_loss_coeff": 1.0},
            "moe_global_aux_loss_coeff 1.0 is the weight of the loss that",
        ),
        (
            {"moe_router_force_load_balancing": True, "moe_router_num_groups": 4}
            | {"moe_router_group_topk": 2},
            "moe_router_num_groups 4 has no effect with moe_router_force_load_balancing True",
        ),
        ({"num_experts": 100_001}, "num_experts is 100001, more than 100000; use 100000 or less"),
    ],
)
def test_settings_at_the_bound_of_a_rule_are_refused(small, changes, words):
    with pytest.raises(ConfigError) as caught:
        small(**{**EXPERTS, **changes})
    assert words in str(caught.value)


def test_every_loss_has_its_coefficient_and_name(small):
    weights = {"moe_aux_loss_coeff": 0.1, "moe_seq_aux_loss_coeff": 0.2}
    weights |= {"moe_global_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.4}
    every = spec(small, **weights)
    assert every.balancing_losses == {"aux_loss": 0.1, "seq_aux_loss": 0.2, "global_aux_loss": 0.3}
    assert every.auxiliary_losses() == (
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "global_load_balancing_loss",
        "z_loss",
    )
    one = spec(small, moe_aux_loss_coeff=0.5, moe_router_load_balancing_type="seq_aux_loss")
    assert one.balancing_losses == {"seq_aux_loss": 0.5}
    assert one.auxiliary_losses() == ("seq_load_balancing_loss",)
    assert spec(small).auxiliary_losses() == ()


@pytest.mark.parametrize(
    ("changes", "feature", "setting"),
    [
        ({"moe_router_topk": 1}, "from_scratch", "{moe_router_topk}"),
        ({"moe_router_topk": 1, **PRE}, "from_scratch", None),
        ({"moe_router_topk": 1, **SIGMOID}, "from_scratch", None),
        (
            {"moe_router_topk": 1, **SIGMOID, "moe_router_norm_topk_prob": "yes"},
            "from_scratch",
            "{moe_router_topk}",
        ),
        ({}, "from_scratch", None),
        (
            {"moe_router_topk": 1, **PRE, "moe_router_expert_choice": True},
            "from_scratch",
            None,
        ),
        ({}, "decode", None),
        ({**PRE, "moe_router_expert_choice": True}, "decode", "{moe_router_expert_choice:name}"),
        ({}, "equal_layouts", None),
        ({"moe_aux_loss_coeff": 0.1}, "equal_layouts", None),
        (
            {"moe_router_force_load_balancing": True},
            "equal_layouts",
            "{moe_router_force_load_balancing:name}",
        ),
        ({"moe_global_aux_loss_coeff": 0.1}, "equal_layouts", "{moe_global_aux_loss_coeff}"),
        (
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"},
            "equal_layouts",
            "{moe_router_load_balancing_type}",
        ),
        ({}, "document_pool", "{num_experts:name}"),
        ({}, "compiled_split", "{num_experts:name}"),
        ({}, "compile", None),
    ],
)
def test_experts_name_the_setting_that_a_feature_does_not_support(small, changes, feature, setting):
    found = spec(small, **changes).unsupported_reason(feature)
    assert (None if found is None else found.setting) == setting


def test_experts_in_turn_continue_after_those_of_other_ranks():
    found = balanced_experts(3, 2, 5, first=4)
    assert found.tolist() == [[3, 4], [0, 1], [2, 3]]  # 8 % 5, 9 % 5, ...
    assert balanced_experts(2, 3, 4, first=0).tolist() == [[0, 1, 2], [3, 0, 1]]


@pytest.mark.parametrize(
    ("routed", "top_k", "share"),
    [(8, 1, 2), (9, 1, 3), (7, 1, 2), (5, 2, 3), (4, 2, 2), (1, 1, 1), (0, 2, 0)],
)
def test_an_expert_selects_its_share_of_the_routed_tokens_rounded_up(routed, top_k, share):
    """Zhou et al. 2022: k tokens of every e, here 4 experts and up to 12 tokens."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(12, 4, generator=generator)
    found = tokens_of_experts(scores, torch.arange(12) < routed, top_k, AXIS)
    assert (found >= 0).sum(0).tolist() == [share] * 4
    assert (found[routed:] == -1).all()


def test_weights_are_compared_in_steps_of_two_to_the_minus_16():
    def kept(more):
        weights = torch.tensor([[0.5], [0.5 + more]], dtype=torch.float64)
        experts, indices = torch.zeros(2, 1, dtype=torch.int64), torch.arange(2)
        return kept_choices(experts, weights, indices, capacity=1, by_weight=True).flatten()

    assert STEP == 1 / 65536
    assert kept(1 / 65536).tolist() == [False, True]
    assert kept(0.4 / 65536).tolist() == [True, False]


def test_a_sequence_of_padding_alone_adds_nothing_to_a_loss():
    """Of two sequences, one has a token and the other has none: 3 f P = 3 * 1 * P of expert 2."""
    given = routing([[0.5, -1.0, 2.0], [4.0, 0.0, 1.0]], [[2], [-1]])
    value = load_balancing_loss(given, torch.tensor([0, 1]), 2, AXIS)
    expected = 3 * math.exp(2.0) / (math.exp(0.5) + math.exp(-1.0) + math.exp(2.0))
    assert float(value) == pytest.approx(expected, rel=1e-12)
    squared = math.log(math.exp(0.5) + math.exp(-1.0) + math.exp(2.0)) ** 2
    assert float(z_loss(given)) == pytest.approx(squared, rel=1e-12)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_reports_count_selections_probabilities_drops_and_rows_without_room(function):
    logits = [[1.0, 2.0, 0.5], [0.0, 3.0, 1.0], [9.0, 9.0, 9.0]]
    given = routing(logits, [[1, 0], [1, 2], [-1, -1]])
    kept = torch.tensor([[1, -1], [-1, 2], [-1, -1]])
    total = [0.0] * 3
    for row in logits[:2]:  # the last token is padding
        scores = [math.exp(x) if function == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
        total = [one + score / sum(scores) for one, score in zip(total, scores, strict=True)]
    for overflow, beyond in ((None, 0), (torch.tensor(4), 4)):
        found = routing_counts(given, kept, overflow, function)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx([1, 2, 1, *total, 2, beyond], rel=1e-12)


def values_of(counts, experts):
    return {each.name: each.value for each in routing_measures(counts, experts)}


def test_measures_of_a_layer_are_those_of_a_hand_computed_step():
    found = routing_measures([2, 6, 4, 6.0, 0.0, 2.0, 3, 0], 3)
    assert [(each.name, each.title, each.worst, each.remedy) for each in found] == [
        ("moe/expert_load", "expert load", "largest", ""),
        ("moe/router_entropy", "router entropy", "smallest", ""),
        ("moe/dropped_share", "dropped share", "largest", ""),
    ]
    load, entropy, dropped = (each.value for each in found)
    assert load == 6 / (12 / 3)
    shares = (0.75, 0.25)
    expected = -sum(share * math.log(share) for share in shares) / math.log(3)
    assert entropy == pytest.approx(expected, rel=1e-12)
    assert dropped == 3 / 12


def test_measures_without_tokens_are_not_numbers_and_one_expert_is_even():
    nothing = values_of([0, 0, 0.0, 0.0, 0, 0], 2)
    assert len(nothing) == 3 and all(math.isnan(value) for value in nothing.values())
    infinite = values_of([1, 1, math.inf, 1.0, 0, 0], 2)
    assert math.isnan(infinite["moe/router_entropy"]) and infinite["moe/expert_load"] == 1
    assert values_of([5, 5.0, 0, 0], 1)["moe/router_entropy"] == 1
    uneven = values_of([1, 1, 0.75, 2.25, 0, 0], 2)["moe/router_entropy"]
    assert uneven == pytest.approx(0.25 * 2 + 0.75 * math.log2(4 / 3), rel=1e-12)


def test_rows_without_room_are_a_measure_with_a_remedy():
    found = routing_measures([1, 1, 1.0, 1.0, 0, 7], 2)[3]
    assert (found.name, found.title, found.value) == ("moe/overflow", "selections without room", 7)
    assert "--moe-expert-rank-capacity-factor" in found.remedy and found.worst == "largest"


def test_a_layer_counts_two_values_of_each_expert_and_two_more(small):
    assert spec(small).counters() == 18
    assert not spec(small).always_counts()
    assert spec(small, moe_expert_rank_capacity_factor=1.5).always_counts()
    assert not spec(small).uses_noise and spec(small, moe_input_jitter_eps=0.1).uses_noise


def test_a_replay_without_layers_says_so():
    replay = RouterReplay({})
    assert not replay.recording and RouterReplay().recording
    with pytest.raises(ConfigError, match="no experts of layer 4, only of layers none"):
        replay.experts_of(4, (1, 2, 2))
