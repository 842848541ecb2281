"""Settings of experts: defaults, limits, layouts that fit, and what cannot be changed."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from megatron_models import ConfigError
from megatron_models.components.moe.capacity import ExpertCapacity
from megatron_models.components.moe.config import MoEConfig
from megatron_models.components.moe.spec import MoESpec
from megatron_models.grouped_multiply import GroupedMultiply
from megatron_models.layer_pattern import layer_pattern
from megatron_parallel import Mesh, ParallelLayout

EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}

DEFAULTS = {  # those of Megatron-LM, where 0 stands for None too, and off for our own settings
    "num_experts": 0,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": 0,
    "moe_router_group_topk": 0,
    "moe_router_group_score_topk": 0,
    "moe_router_add_bias": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_expert_choice": False,
    "moe_router_force_load_balancing": False,
    "moe_apply_probs_on_input": False,
    "moe_input_jitter_eps": 0.0,
    "moe_aux_loss_coeff": 0.0,
    "moe_seq_aux_loss_coeff": 0.0,
    "moe_global_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
    "moe_expert_capacity_factor": 0.0,
    "moe_pad_expert_input_to_capacity": False,
    "moe_expert_rank_capacity_factor": 0.0,
    "moe_ffn_hidden_size": 0,
    "moe_shared_expert_intermediate_size": 0,
    "moe_shared_expert_gate": False,
}
OBJECTIVE = {
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_input_jitter_eps",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_seq_aux_loss_coeff",
    "moe_global_aux_loss_coeff",
    "moe_z_loss_coeff",
}
"""Settings that affect training alone."""
MEMORY = {"moe_pad_expert_input_to_capacity", "moe_expert_rank_capacity_factor"}
"""Settings that change no result, only how much memory rows have."""


def own_fields():
    names = {"num_experts", *(e.name for e in fields(MoEConfig) if e.name.startswith("moe_"))}
    return [entry for entry in fields(MoEConfig) if entry.name in names]


def test_defaults_are_no_experts_and_nothing_that_is_not_asked_for():
    numbers = {e.name: e.default for e in own_fields() if not isinstance(e.default, str)}
    assert numbers == DEFAULTS


def test_settings_of_training_and_memory_are_no_part_of_the_function_of_a_model():
    def marked(key):
        return {entry.name for entry in own_fields() if entry.metadata.get(key)}

    assert marked("objective") == OBJECTIVE
    assert marked("no_effect") == OBJECTIVE | MEMORY
    assert marked("derived") == {"moe_router_group_score_topk"}


NUMBERS = [n for n, v in DEFAULTS.items() if not isinstance(v, bool) and n != "moe_router_topk"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_not_negative(small, name):
    with pytest.raises(ConfigError, match=rf"{name} must be a (positive number|number of at leas)"):
        small(**{**EXPERTS, name: -1 if isinstance(DEFAULTS[name], int) else -1.0})


def test_the_factor_of_weights_is_not_zero(small):
    with pytest.raises(ConfigError, match="moe_router_topk_scaling_factor must be a positive"):
        small(**EXPERTS, moe_router_topk_scaling_factor=0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_router_topk": 8},
        {"moe_router_topk": 1},
        {"moe_router_load_balancing_type": "none"},
        {"moe_input_jitter_eps": 0.999},
        {"moe_expert_capacity_factor": 8.0},
        {**GROUPS, "moe_router_topk": 4},
        {**GROUPS, "moe_router_group_topk": 3},
        {**GROUPS, "moe_router_group_score_topk": 2},
    ],
)
def test_settings_at_the_end_of_their_range_are_accepted(small, changes):
    assert changes.items() <= vars(small(**{**EXPERTS, **changes})).items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_topk": 0}, "moe_router_topk 0 must lie between 1 and num_experts 8; use 1"),
        ({"moe_router_topk": 9}, "moe_router_topk 9 must lie between 1 and num_experts 8; use 8"),
        ({"moe_expert_capacity_factor": 8.5}, "moe_expert_capacity_factor 8.5 exceeds num_exp"),
        ({**GROUPS, "moe_router_num_groups": 1}, "have no effect; use no groups"),
        ({**GROUPS, "moe_router_topk": 7}, "than moe_router_topk 7; use no groups, or"),
        ({**GROUPS, "moe_router_topk": 6}, "than moe_router_topk 6; use 3 groups, or"),
    ],
)
def test_settings_beyond_their_range_are_refused(small, changes, message):
    with pytest.raises(ConfigError) as caught:
        small(**{**EXPERTS, **changes})
    assert message in str(caught.value)


def test_descriptions_have_named_fields_that_cannot_be_changed(small):
    spec = small(**EXPERTS).component(MoESpec)
    kinds = {each.kind for each in inspect.signature(MoESpec).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    multiply = GroupedMultiply(torch.ones(1), False, torch.add)
    for part, name in ((spec, "num_experts"), (spec.experts_up, "inputs"), (multiply, "has_tail")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)
    assert multiply == multiply != GroupedMultiply(torch.ones(1), False, torch.add)


def test_some_layers_of_a_model_keep_their_experts(small):
    config = small(**EXPERTS, num_layers=4, moe_layer_freq="2")
    assert config.moe_layers == (True, False, True, False)
    text = config.fields_for_layers([0, 2, 3])["moe_layer_freq"]
    assert layer_pattern(text, 3) == (True, True, False)
    dense = small()
    assert dense.moe_layers == (False, False)
    assert "moe_layer_freq" not in dense.fields_for_layers([0])


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ({"ep": 2}, {}, ""),
        ({"ep": 3}, {}, "ep 3 cannot cut num_experts 8 into 3 equal parts"),
        ({"tp": 4}, {}, ""),
        ({"tp": 8}, {}, "^tp 8 cannot cut the experts' moe_ffn_hidden_size 12 into 8"),
        ({"tp": 8, "etp": 4}, {}, ""),
        ({"tp": 8, "etp": 8}, {}, "^etp 8 cannot cut the experts' moe_ffn_hidden_size 12 into 8"),
        ({"tp": 16}, {"moe_ffn_hidden_size": 16}, "cut the experts' hidden_size 24 into 16 equal"),
        ({"tp": 16}, {"moe_ffn_hidden_size": 16, "add_bias_linear": False}, ""),
        ({"tp": 4}, {"moe_shared_expert_intermediate_size": 8}, ""),
        (
            {"tp": 4},
            {"moe_shared_expert_intermediate_size": 6},
            "tp 4 cannot cut moe_shared_expert_intermediate_size 6 into 4 equal parts",
        ),
    ],
)
def test_a_layout_divides_experts_and_their_channels(small, layout, changes, message):
    spec = small(**{**EXPERTS, **changes}).component(MoESpec)
    chosen = ParallelLayout(dp=layout.get("ep", 1), **layout)
    if not message:
        spec.check_layout(chosen)
        return
    with pytest.raises(ConfigError, match=message):
        spec.check_layout(chosen)


@pytest.mark.parametrize(
    ("layout", "capacity", "rows"),
    [({}, 3, 3), ({"cp": 2}, 6, 6), ({"dp": 2, "ep": 2}, 3, 6), ({"tp": 2}, 3, 3)],
)
def test_an_expert_has_rows_of_every_micro_batch_of_its_ranks(small, layout, capacity, rows):
    """Of 6 tokens with 2 of 8 experts and a factor of 2, an expert accepts 6 * 2 / 8 * 2 = 3."""
    spec = small(**EXPERTS, moe_expert_capacity_factor=2.0).component(MoESpec)
    found = ExpertCapacity(spec, Mesh(ParallelLayout(**{"dp": 1, **layout}), 0))
    assert (found.capacity((3, 2)), found.rows((3, 2))) == (capacity, rows)
