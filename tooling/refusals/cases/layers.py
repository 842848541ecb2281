"""Wrong configurations of layers and of the models that they make up."""

from collections.abc import Mapping
from typing import Any

from refusals.cases.case import EXPERTS, LATENT, Case, blocks

BLOCK = {
    "a bias of norms without one": Case(
        {"normalization": "RMSNorm", "norm_bias": False},
        "norm_bias has no effect with normalization RMSNorm, which has no bias; leave it out",
        {"norm_bias": None},
    ),
    "parallel sublayers with other norms": Case(
        {"parallel_residual": "two_norms", "norm_placement": "post"},
        "parallel_residual two_norms needs norm_placement 'pre', not 'post'",
        {"norm_placement": "pre"},
    ),
    "a bound of no gate": Case(
        {"activation_func_clamp_value": 7.0},
        "activation_func_clamp_value 7.0 needs a gated activation (swiglu, |not 'gelu'",
        {"activation": "swiglu"},
    ),
    "a weight of no prediction": Case(
        {"mtp_loss_scaling_factor": 0.3},
        "mtp_loss_scaling_factor 0.3 has no effect without mtp_num_layers; set it to 1 or more",
        {"mtp_num_layers": 1},
    ),
    "a base width without its parametrization": Case(
        {"mup_base_hidden_size": 12},
        "mup_base_hidden_size 12 has no effect without use_mup; leave it out",
        {"mup_base_hidden_size": None},
    ),
    "a power of scores above 2": Case(
        {"use_mup": True, "mup_attn_scale_power": 3.0},
        "mup_attn_scale_power is 3.0, more than 2; use 2 or less",
        {"mup_attn_scale_power": 2.0},
    ),
}

_JSON = "heterogeneous_layers_config_encoded_json: "

_STRANGER = "collections:OrderedDict"

LAYERS = {
    "no JSON": Case({"heterogeneous_layers_config_encoded_json": "{"}, f"{_JSON}not JSON|give one"),
    "deep JSON": Case(
        {"heterogeneous_layers_config_encoded_json": "[" * 100_000},
        f"{_JSON}nested too deeply; give one map for each layer",
    ),
    "no list": Case(
        {"heterogeneous_layers_config_encoded_json": "{}"}, f"{_JSON}neither a list nor a map with"
    ),
    "too few blocks": Case(
        {"heterogeneous_layers_config_encoded_json": "[{}]"},
        "has 1 layers, but num_layers is 4; give one block for each layer",
        {"num_layers": 1},
    ),
    "no map": Case(blocks("1"), "layer 0 is 1, not a map of attention and mlp"),
    "an unknown sublayer": Case(
        blocks('{"mixer": {}}'), "layer 0: unknown key 'mixer'; use attention or mlp"
    ),
    "two names": Case(blocks('{"mlp": {}, "ffn": {}}'), "layer 0 has both mlp and ffn|leave one"),
    "an empty layer": Case(
        blocks('{"attention": {"no_op": true}, "mlp": {"no_op": true}}'),
        "layer 0 has neither attention nor mlp; leave the layer out",
    ),
    "no map of settings": Case(blocks('{"mlp": 3}'), "layer 0, mlp is 3, not a map"),
    "no name of a module": Case(
        blocks('{"mlp": {"module": 3}}'), "layer 0, mlp: module is 3, not package.module:Class"
    ),
    "an unknown kind": Case(
        blocks('{"mlp": {"kind": "sparse"}}'),
        "layer 0, mlp: kind is 'sparse'; kinds of mlp are dense and moe",
        blocks('{"mlp": {"kind": "dense"}}'),
    ),
    "two replacements": Case(
        blocks('{"mlp": {"no_op": true, "replace_with_linear": true}}'),
        "layer 0, mlp: no_op, replace_with_linear and module exclude each other",
    ),
    "settings of no sublayer": Case(
        blocks('{"mlp": {"no_op": true, "ffn_hidden_size": 4}}'),
        "layer 0, mlp: ffn_hidden_size has no effect with no_op or replace_with_linear",
    ),
    "a kind of a module": Case(
        blocks('{"mlp": {"module": "a:b", "kind": "moe"}}'),
        "layer 0, mlp: kind has no effect with module; leave one out",
    ),
    "no switch": Case(
        blocks('{"mlp": {"no_op": 1}}'), "layer 0, mlp: no_op must be true or false, not 1"
    ),
    "an unknown setting": Case(
        blocks('{"mlp": {"ffn_hiden_size": 4}}'),
        "layer 0, mlp: unknown key 'ffn_hiden_size'; did you mean 'ffn_hidden_size'",
        blocks('{"mlp": {"ffn_hidden_size": 4}}'),
    ),
    "a size twice": Case(
        blocks('{"mlp": {"ffn_hidden_size": 4, "ffn_mult": 2}}'),
        "layer 0, mlp: ffn_mult and ffn_hidden_size exclude each other; leave one out",
    ),
    "heads of a group": Case(
        blocks('{"attention": {"n_heads_in_group": 3}}'),
        "n_heads_in_group is 3, which does not divide the heads (4); use 2 or 4",
        blocks('{"attention": {"n_heads_in_group": 2}}'),
    ),
    "a negative factor": Case(
        blocks('{"mlp": {"ffn_mult": -1}}'),
        "ffn_mult must be a positive number below 2^20, not -1; 4 is usual",
        blocks('{"mlp": {"ffn_mult": 4}}'),
    ),
    "heads of a layer": Case(
        blocks('{"attention": {"num_query_groups": 3}}'),
        "layer 0, attention: num_attention_heads 4 is not a multiple of num_query_groups 3|2 or 4",
        blocks('{"attention": {"num_query_groups": 2}}'),
    ),
    "a latent layer with groups": Case(
        {**LATENT, **blocks('{"attention": {"num_query_groups": 2}}')},
        "layer 0, attention: multi_latent_attention needs num_query_groups = 4, not 2",
        blocks('{"attention": {"num_query_groups": 4}}'),
    ),
    "experts of a dense layer": Case(
        blocks('{"mlp": {"moe_router_topk": 1}}'),
        "layer 0, mlp: moe_router_topk needs a layer of kind moe; leave it out",
        blocks("{}"),
    ),
    "a layer of experts in a dense model": Case(
        blocks('{"mlp": {"kind": "moe"}}'),
        "layer 0, mlp: the kind moe needs num_experts of at least 1, not 0; set it",
        {"num_experts": 2},
    ),
    "experts that no layer has": Case(
        {
            **EXPERTS,
            "heterogeneous_layers_config_encoded_json": '[{"mlp": {"kind": "dense"}}'
            + ', {"mlp": {"no_op": true}}' * 3
            + "]",
        },
        "num_experts 8 has no effect, since no layer has experts; set num_experts 0",
        {"num_experts": 0},
    ),
    "a list of modules": Case(
        {"layer_modules": "mlp"},
        "layer_modules is 'mlp', not attention=package.module:Class, mlp=package.module:Class",
    ),
    "a module that does not exist": Case(
        {"layer_modules": "mlp=nowhere:Class"}, "'nowhere:Class', which cannot be imported|give"
    ),
    "a module that is no mixer": Case(
        {"layer_modules": f"mlp={_STRANGER}"},
        f"{_STRANGER} is <class|not a class that derives from Mixer and ComponentConfig",
    ),
    "a long name": Case(
        {"layer_modules": "mlp=" + "a" * 300}, "is no name of a module; give package.module:Class"
    ),
    "settings of a replaced layer": Case(
        {
            **blocks('{"mlp": {"ffn_hidden_size": 4}}'),
            "layer_modules": "mlp=megatron_models.components.linear.spec:LinearSpec",
        },
        "layer 0, mlp: its settings have no effect with layer_modules|give the layer a module",
        blocks("{}"),
    ),
    "a field that a module lacks": Case(
        blocks(
            '{"mlp": {"module": "megatron_models.components.linear.spec:LinearSpec", "rank": 4}}'
        ),
        "LinearSpec has no field 'rank' that a layer may change; use one of",
    ),
}

_MAMBA: Mapping[str, Any] = {
    "num_attention_heads": None,
    "ffn_hidden_size": None,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
}

_HYBRID: Mapping[str, Any] = {
    "hybrid_layer_pattern": "M*-M",
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
}

_PATTERN = "hybrid_layer_pattern"

RECURRENT = {
    "a width that heads do not divide": Case(
        {**_MAMBA, "mamba_head_dim": 36},
        "mamba_head_dim 36 does not divide 2 x hidden_size 24; use mamba_head_dim 24 or 48",
        {"mamba_head_dim": 24},
        kind="mamba",
    ),
    "groups that do not divide the heads": Case(
        {**_MAMBA, "mamba_num_groups": 4},
        "mamba_num_groups 4 does not divide mamba_num_heads 6; use mamba_num_groups 3",
        {"mamba_num_groups": 3},
        kind="mamba",
    ),
    "limits of time steps": Case(
        {**_MAMBA, "mamba_dt_min": 0.1, "mamba_dt_max": 0.1},
        "mamba_dt_max 0.1 is not above mamba_dt_min 0.1; use a larger value, or 0 for no limit",
        {"mamba_dt_max": 0.0},
        kind="mamba",
    ),
    "positions without attention": Case(
        {**_MAMBA, "position_embedding_type": "rope"},
        "position_embedding_type rope needs attention|use none",
        {"position_embedding_type": "none"},
        kind="mamba",
    ),
    "groups over tensor-parallel ranks": Case(
        _MAMBA,
        "tp 4 cannot cut mamba_num_groups 2 into 4 equal parts; use tp 2",
        layout={"tp": 4},
        fixed_layout={"tp": 2},
        kind="mamba",
    ),
    "groups over context-parallel ranks": Case(
        _MAMBA,
        "cp 2 cannot cut the 1 of mamba_num_groups 2 that tp 2 leaves on a rank; use cp 1",
        layout={"tp": 2, "cp": 2},
        fixed_layout={"tp": 2, "cp": 1},
        kind="mamba",
    ),
    "an unknown symbol": Case(
        {**_HYBRID, _PATTERN: "M*-X"},
        "hybrid_layer_pattern has the unknown symbol 'X'; use M (Mamba-2), |* (attention)",
        {_PATTERN: "M*-M"},
        kind="hybrid",
    ),
    "an empty stage": Case(
        {**_HYBRID, _PATTERN: "M*||-M"},
        "hybrid_layer_pattern has a pipeline stage without layers; put layers around each",
        {_PATTERN: "M*-M"},
        kind="hybrid",
    ),
    "a long pattern": Case(
        {**_HYBRID, _PATTERN: "M" * 200_000},
        "hybrid_layer_pattern has 200000 symbols; use at most 100000",
        kind="hybrid",
    ),
    "another number of layers": Case(
        {**_HYBRID, _PATTERN: "M*-"},
        "hybrid_layer_pattern has 3 layers, but num_layers is 4; use num_layers 3 or leave it out",
        {"num_layers": 3},
        kind="hybrid",
    ),
    "no layer of experts": Case(
        {**_HYBRID, "num_experts": 4},
        "hybrid_layer_pattern has no layer E, but num_experts is 4; use num_experts 0",
        {"num_experts": 0},
        kind="hybrid",
    ),
    "no experts for a layer": Case(
        {**_HYBRID, _PATTERN: "M*EM"},
        "hybrid_layer_pattern has a layer E, but num_experts is 0; use num_experts of at least 1",
        {"num_experts": 2},
        kind="hybrid",
    ),
    "another pattern of experts": Case(
        {**_HYBRID, _PATTERN: "M*EE", "num_experts": 4, "moe_layer_freq": "2"},
        "moe_layer_freq 2 has no effect with hybrid_layer_pattern, whose symbol E|leave it out",
        {"moe_layer_freq": None},
        kind="hybrid",
    ),
    "a field of a layer that is not there": Case(
        {**_HYBRID, _PATTERN: "**--", "mamba_num_groups": None, "mamba_head_dim": 8},
        "mamba_head_dim 8 has no effect without a layer M in hybrid_layer_pattern; leave it at 64",
        {"mamba_head_dim": 64},
        kind="hybrid",
    ),
    "stages of a pattern": Case(
        {**_HYBRID, _PATTERN: "M*|-M"},
        "hybrid_layer_pattern has 2 pipeline stages, but the layout has 4; use 3 times",
        layout={"pp": 4},
        fixed_layout={"pp": 2},
        kind="hybrid",
    ),
}
