"""DeepSeek-V2: multi-latent attention and softmax routing within groups (DeepSeek-AI, 2024)."""

from typing import Any

from megatron_models.families.family import Family
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import deepseek_rows, deepseek_settings
from megatron_models.models.gpt.families.rope import rope

_METHODS = ("greedy", "group_limited_greedy")


def _groups_from_hf(title: str, hf_config: HFConfig) -> dict[str, Any]:
    method = hf_config.get("topk_method", "greedy")
    if method not in _METHODS:
        raise unsupported_hf_field(title, "topk_method", method, _METHODS)
    if method == "greedy":
        return {}
    found = {}
    for field, name in (
        ("moe_router_num_groups", "n_group"),
        ("moe_router_group_topk", "topk_group"),
    ):
        found[field] = hf_config.get(name)
        if type(found[field]) is not int:
            raise unsupported_hf_field(title, name, found[field], ["integers"])
    groups, chosen = found.values()
    return {} if groups == chosen else {**found, "moe_router_group_score_topk": 1}


def _groups_to_hf(config: GPTConfig) -> dict[str, Any]:
    if not config.moe_router_num_groups:
        return {"topk_method": "greedy", "n_group": None, "topk_group": None}
    if config.moe_router_group_score_topk != 1:
        raise unsupported_field(
            "moe_router_group_score_topk", "1", config.moe_router_group_score_topk
        )
    return {
        "topk_method": "group_limited_greedy",
        "n_group": config.moe_router_num_groups,
        "topk_group": config.moe_router_group_topk,
    }


FAMILY = Family(
    name="deepseek_v2",
    kind="gpt",
    title="DeepSeek-V2",
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    rows=deepseek_rows.ROWS,
    settings={
        **deepseek_settings.SETTINGS,
        "qk_pos_emb_head_dim": Mapped("qk_rope_head_dim", absent=64),
        "rotary_interleaved": Constant(True),
        "num_experts": Mapped("n_routed_experts", absent=64),
        "moe_router_topk": Mapped("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": Mapped("routed_scaling_factor", absent=1.0),
        "moe_router_pre_softmax": Constant(True),
    },
    custom=(
        rope(10000.0, latent=True),
        deepseek_settings.attention(None),
        deepseek_settings.dense_layers(0),
        deepseek_settings.shared_experts(2, 1407),
        Custom(
            deepseek_settings.GROUPS,
            ("topk_method", "n_group", "topk_group"),
            _groups_from_hf,
            _groups_to_hf,
        ),
        deepseek_settings.EPSILON,
    ),
    neutral={
        "auto_map": deepseek_settings.released_code("V2"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
        "pretraining_tp": (1,),
        "mlp_bias": (False,),
    },
    without_effect=deepseek_settings.WITHOUT_EFFECT | {"head_dim"},
    exported_constants={"attention_dropout": 0.0},
    prefix="model.",
)
