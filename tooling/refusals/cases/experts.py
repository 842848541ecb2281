"""Wrong configurations of experts and their routers."""

from refusals.cases.case import CHOICE, EXPERTS, GROUPS, PRE, SINKHORN, Case

ROUTER = {
    "too many experts of a token": Case(
        {**EXPERTS, "moe_router_topk": 9},
        "moe_router_topk 9 must lie between 1 and num_experts 8; use 8",
        {"moe_router_topk": 8},
    ),
    "no expert of a token": Case(
        {**EXPERTS, "moe_router_topk": 0},
        "moe_router_topk 0 must lie between 1 and num_experts 8; use 1",
        {"moe_router_topk": 1},
    ),
    "noise that deletes inputs": Case(
        {**EXPERTS, "moe_input_jitter_eps": 1.0},
        "moe_input_jitter_eps 1.0 must be below 1|0.01 is usual",
        {"moe_input_jitter_eps": 0.01},
    ),
    "a softmax before sigmoids": Case(
        {**PRE, "moe_router_score_function": "sigmoid"},
        "moe_router_pre_softmax has no effect with moe_router_score_function sigmoid; leave it out",
        {"moe_router_pre_softmax": None},
    ),
    "a sum that is 1": Case(
        {**EXPERTS, "moe_router_norm_topk_prob": "yes"},
        "moe_router_norm_topk_prob yes has no effect on a softmax|add moe_router_pre_softmax",
        {"moe_router_pre_softmax": True},
    ),
    "a sum over tokens": Case(
        {**CHOICE, "moe_router_norm_topk_prob": "yes"},
        "moe_router_norm_topk_prob yes does not work with moe_router_expert_choice|leave it out",
        {"moe_router_norm_topk_prob": None},
    ),
    "a default": Case(
        {**PRE, "moe_router_norm_topk_prob": "no"},
        "moe_router_norm_topk_prob no is the default with|leave it out",
        {"moe_router_norm_topk_prob": None},
    ),
    "a rate of no bias": Case(
        {**PRE, "moe_router_bias_update_rate": 0.5},
        "moe_router_bias_update_rate 0.5 has no effect without a bias; add",
        {"moe_router_enable_expert_bias": True},
    ),
    "a bias of logits": Case(
        {**EXPERTS, "moe_router_enable_expert_bias": True},
        "moe_router_enable_expert_bias needs moe_router_score_function sigmoid or",
        {"moe_router_score_function": "sigmoid"},
    ),
    "scores of no groups": Case(
        {**PRE, "moe_router_group_score_topk": 2},
        "moe_router_group_score_topk 2 has no effect without groups; set moe_router_num_groups",
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "groups without a choice": Case(
        {**PRE, "moe_router_num_groups": 4},
        "moe_router_num_groups 4 and moe_router_group_topk 0 need each other; set both or none",
        {"moe_router_group_topk": 2},
    ),
    "groups that do not divide": Case(
        {**GROUPS, "moe_router_num_groups": 3},
        "moe_router_num_groups 3 does not divide num_experts 8; use 2 or 4",
        {"moe_router_num_groups": 4},
    ),
    "all groups": Case(
        {**GROUPS, "moe_router_group_topk": 4},
        "moe_router_group_topk 4 must be less than moe_router_num_groups 4|use 3",
        {"moe_router_group_topk": 3},
    ),
    "one group": Case(
        {**GROUPS, "moe_router_num_groups": 1, "moe_router_group_topk": 1},
        "moe_router_group_topk 1 must be less than moe_router_num_groups 1|use no groups",
        {"moe_router_num_groups": 0, "moe_router_group_topk": 0},
    ),
    "groups with too few experts": Case(
        {**GROUPS, "moe_router_topk": 5},
        "moe_router_group_topk 2 groups of 2 experts have fewer experts than moe_router_topk 5; "
        "use 3 groups, or moe_router_topk 4",
        {"moe_router_group_topk": 3},
    ),
    "groups that no choice satisfies": Case(
        {**GROUPS, "moe_router_topk": 7},
        "fewer experts than moe_router_topk 7; use no groups, or moe_router_topk 4",
        {"moe_router_topk": 4},
    ),
    "more scores than experts": Case(
        {**GROUPS, "moe_router_group_score_topk": 3},
        "moe_router_group_score_topk 3 exceeds the 2 experts of a group; use 2",
        {"moe_router_group_score_topk": 2},
    ),
    "two selections": Case(
        {**SINKHORN, "moe_router_force_load_balancing": True},
        "moe_router_force_load_balancing True and moe_router_load_balancing_type sinkhorn exclude",
        {"moe_router_force_load_balancing": None},
    ),
    "groups of another selection": Case(
        {**GROUPS, "moe_router_load_balancing_type": "sinkhorn"},
        "moe_router_num_groups 4 has no effect with moe_router_load_balancing_type sinkhorn",
        {"moe_router_load_balancing_type": None},
    ),
    "experts that choose by a softmax of the chosen": Case(
        {**EXPERTS, "moe_router_expert_choice": True},
        "moe_router_expert_choice needs scores of all experts; add moe_router_pre_softmax",
        {"moe_router_pre_softmax": True},
    ),
    "a loss of experts that choose": Case(
        {**CHOICE, "moe_seq_aux_loss_coeff": 0.1},
        "moe_seq_aux_loss_coeff 0.1 has no effect with moe_router_expert_choice|set it to 0",
        {"moe_seq_aux_loss_coeff": 0.0},
    ),
    "weighted inputs of experts that choose": Case(
        {**CHOICE, "moe_apply_probs_on_input": True},
        "moe_apply_probs_on_input does not work with moe_router_expert_choice; leave one out",
        {"moe_apply_probs_on_input": None},
    ),
    "a capacity of experts that choose": Case(
        {**CHOICE, "moe_expert_capacity_factor": 1.0},
        "moe_expert_capacity_factor 1.0 does not work with moe_router_expert_choice|leave one",
        {"moe_expert_capacity_factor": None},
    ),
    "a loss with Sinkhorn": Case(
        {**SINKHORN, "moe_aux_loss_coeff": 0.1},
        "moe_aux_loss_coeff 0.1 does not work with moe_router_load_balancing_type sinkhorn|to 0",
        {"moe_aux_loss_coeff": 0.0},
    ),
    "Sinkhorn without a softmax": Case(
        {**SINKHORN, "moe_router_pre_softmax": False},
        "sinkhorn with moe_router_topk 2 has weights by a softmax|add moe_router_pre_softmax",
        {"moe_router_pre_softmax": True},
    ),
    "Sinkhorn without sigmoids": Case(
        {**SINKHORN, "moe_router_topk": 1, "moe_router_pre_softmax": False},
        "sinkhorn with moe_router_topk 1 has sigmoids as weights; set moe_router_score_function",
        {"moe_router_score_function": "sigmoid"},
    ),
    "a loss that is off": Case(
        {**EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
        "moe_aux_loss_coeff 0.1 has no effect with moe_router_load_balancing_type none; set it to",
        {"moe_router_load_balancing_type": "aux_loss"},
    ),
    "a loss twice": Case(
        {
            **EXPERTS,
            "moe_seq_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": "seq_aux_loss",
        },
        "moe_seq_aux_loss_coeff 0.1 is the weight of the loss that|use moe_aux_loss_coeff",
        {"moe_seq_aux_loss_coeff": 0.0, "moe_aux_loss_coeff": 0.1},
    ),
}

MOE = {
    "settings of no experts": Case(
        {"moe_router_topk": 1},
        "moe_router_topk 1 has no effect without experts; set num_experts, or leave it at 2",
        {"moe_router_topk": 2},
    ),
    "a policy without a capacity": Case(
        {**EXPERTS, "moe_token_drop_policy": "position"},
        "moe_token_drop_policy position has no effect without moe_expert_capacity_factor|1.0",
        {"moe_expert_capacity_factor": 1.0},
    ),
    "a capacity above all tokens": Case(
        {**EXPERTS, "moe_expert_capacity_factor": 1e30},
        "moe_expert_capacity_factor 1e+30 exceeds num_experts 8|use at most 8",
        {"moe_expert_capacity_factor": 8.0},
    ),
    "a gate of no expert": Case(
        {**EXPERTS, "moe_shared_expert_gate": True},
        "moe_shared_expert_gate has no effect without a shared expert; set",
        {"moe_shared_expert_intermediate_size": 8},
    ),
    "a pattern of another length": Case(
        {**EXPERTS, "moe_layer_freq": "[0,1]"},
        "moe_layer_freq: the pattern [0,1] has 2 layers, but the model has 4; give one number",
        {"moe_layer_freq": "[0,1]*2"},
    ),
    "experts in no layer": Case(
        {**EXPERTS, "moe_layer_freq": "[0]*4"},
        "moe_layer_freq [0]*4 selects no layer for experts; use 1",
        {"moe_layer_freq": "1"},
    ),
}
