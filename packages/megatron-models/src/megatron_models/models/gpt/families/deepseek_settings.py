"""Settings of DeepSeek-V2 and V3 in ``config.json``."""

from functools import partial
from typing import Any

from megatron_models.families.settings import (
    Constant,
    Custom,
    Derived,
    HFConfig,
    Mapped,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama

_WORDS = {False: "no", True: "yes"}
GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, for every ``rms_norm_eps``."""
COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields of a file that count the depths of multi-token prediction."""


def _integer(title: str, hf_config: HFConfig, name: str, default: int) -> int:
    found = hf_config.get(name, default)
    if type(found) is not int or found < 0:
        raise unsupported_hf_field(title, name, found, ["integers of at least 0"])
    return found


def _layers_from_hf(title: str, hf_config: HFConfig, *, dense: int) -> dict[str, str]:
    count = _integer(title, hf_config, "num_hidden_layers", 0)
    first = min(_integer(title, hf_config, "first_k_dense_replace", dense), count)
    return {"moe_layer_freq": f"[0]*{first}+[1]*{count - first}" if first else "1"}


def _depths_from_hf(title: str, hf_config: HFConfig) -> dict[str, int]:
    given = {name: _integer(title, hf_config, name, 1) for name in COUNTS if name in hf_config}
    count = next(iter(given.values()), 1)  # transformers counts one if the file counts none
    for name, other in given.items():
        if other != count:
            raise unsupported_hf_field(title, name, other, [count])
    dense = _integer(title, hf_config, "first_k_dense_replace", 3)
    if count and dense >= _integer(title, hf_config, "num_hidden_layers", 0):
        return {}  # their layers have experts, unlike all layers of this model
    return {"mtp_num_layers": count}


def _depths_to_hf(config: GPTConfig) -> dict[str, int]:
    return {COUNTS[0]: config.mtp_num_layers}


def _layers_to_hf(config: GPTConfig) -> dict[str, int]:
    first = config.moe_layers.index(True) if any(config.moe_layers) else 0
    expected = (False,) * first + (True,) * (config.num_layers - first)
    if config.moe_layers != expected:
        raise unsupported_field("moe_layers", repr(expected), config.moe_layers)
    return {"first_k_dense_replace": first}


def dense_layers(dense: int) -> Custom:
    """Returns the setting of the first layers, which have no experts.

    Args:
        dense: Number of such layers of a file without it.
    """

    def read(title: str, hf_config: HFConfig) -> dict[str, str]:
        return _layers_from_hf(title, hf_config, dense=dense)

    return Custom(("moe_layer_freq",), ("first_k_dense_replace",), read, _layers_to_hf)


def shared_experts(count: int, width: int) -> Custom:
    """Returns the setting of shared experts, which are one of their total width.

    Args:
        count: Number of shared experts of a file without it.
        width: Width of an expert of a file without it.
    """

    def read(title: str, hf_config: HFConfig) -> dict[str, int]:
        one = _integer(title, hf_config, "moe_intermediate_size", width)
        shared = _integer(title, hf_config, "n_shared_experts", count)
        if not shared:
            raise unsupported_hf_field(title, "n_shared_experts", shared, ["numbers above 0"])
        return {"moe_ffn_hidden_size": one, "moe_shared_expert_intermediate_size": one * shared}

    def write(config: GPTConfig) -> dict[str, int]:
        one, total = config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size
        if total == 0 or total % one:
            raise unsupported_field(
                "moe_shared_expert_intermediate_size", f"a multiple of {one}", total
            )
        return {"moe_intermediate_size": one, "n_shared_experts": total // one}

    fields = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    return Custom(fields, ("moe_intermediate_size", "n_shared_experts"), read, write)


def _attention_from_hf(
    title: str, hf_config: HFConfig, *, key_heads: int | None = None
) -> dict[str, Any]:
    heads = hf_config.get("num_attention_heads")
    groups = hf_config.get("num_key_value_heads", key_heads)
    if groups is not None and groups != heads:
        raise unsupported_hf_field(title, "num_key_value_heads", groups, [heads])
    bias = hf_config.get("attention_bias", False)
    if bias not in (False, True):
        raise unsupported_hf_field(title, "attention_bias", bias, [False, True])
    rank = hf_config.get("q_lora_rank", 1536)
    if rank == 0:
        raise unsupported_hf_field(title, "q_lora_rank", rank, [None, "numbers above 0"])
    return {
        "q_lora_rank": 0 if rank is None else rank,
        "add_qkv_bias": bool(bias),
        "add_attention_out_bias": bool(bias),
    }


def _rotated_from_hf(title: str, hf_config: HFConfig) -> dict[str, Any]:
    rotated = hf_config.get("qk_rope_head_dim", 64)
    if hf_config.get("head_dim", rotated) not in (None, rotated):  # transformers rotates these
        raise unsupported_hf_field(title, "head_dim", hf_config["head_dim"], [rotated])
    return {"qk_pos_emb_head_dim": rotated}


def _rotated_to_hf(config: GPTConfig) -> dict[str, int]:
    return {"qk_rope_head_dim": config.qk_pos_emb_head_dim}


def _attention_to_hf(config: GPTConfig) -> dict[str, Any]:
    if config.add_qkv_bias != config.has_attention_out_bias:
        raise unsupported_field(
            "add_qkv_bias", repr(config.has_attention_out_bias), config.add_qkv_bias
        )
    return {
        "q_lora_rank": config.q_lora_rank or None,
        "attention_bias": config.add_qkv_bias,
        "num_key_value_heads": config.num_attention_heads,
    }


def attention(key_heads: int | None) -> Custom:
    """Returns the setting of the latent of queries, biases, and heads of keys, one per query head.

    Args:
        key_heads: Number of heads of keys of a file without it; None stands for one per query head.
    """
    return Custom(
        ("q_lora_rank", "add_qkv_bias", "add_attention_out_bias"),
        ("q_lora_rank", "attention_bias", "num_key_value_heads"),
        partial(_attention_from_hf, key_heads=key_heads),
        _attention_to_hf,
    )


def _epsilon_from_hf(title: str, hf_config: HFConfig) -> dict[str, Any]:
    found = hf_config.get("rms_norm_eps", _LATENT_EPSILON)
    return {
        "norm_epsilon": found,
        "latent_norm_epsilon": 0.0 if found == _LATENT_EPSILON else _LATENT_EPSILON,
    }


def _epsilon_to_hf(config: GPTConfig) -> dict[str, float]:
    found = config.latent_norm_epsilon or config.norm_epsilon
    if found != _LATENT_EPSILON:
        raise unsupported_field("latent_norm_epsilon", repr(_LATENT_EPSILON), found)
    return {"rms_norm_eps": config.norm_epsilon}


def _normalization_from_hf(title: str, hf_config: HFConfig) -> dict[str, str]:
    found = hf_config.get("norm_topk_prob", True)
    if found not in (None, False, True):
        raise unsupported_hf_field(title, "norm_topk_prob", found, [False, True])
    # Our default divides by the sum of several scores.
    several = hf_config.get("num_experts_per_tok", 8) != 1
    return {"moe_router_norm_topk_prob": "auto" if several == bool(found) else _WORDS[bool(found)]}


def _normalization_to_hf(config: GPTConfig) -> dict[str, bool]:
    return {"norm_topk_prob": config.normalizes_weights}


def _groups_from_hf(title: str, hf_config: HFConfig, *, groups: int, chosen: int) -> dict[str, int]:
    groups = _integer(title, hf_config, "n_group", groups)
    chosen = _integer(title, hf_config, "topk_group", chosen)
    if groups == chosen:  # every group is chosen
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_score_topk": 2,
    }


def _groups_to_hf(config: GPTConfig) -> dict[str, int]:
    if not config.moe_router_num_groups:
        return {"n_group": 1, "topk_group": 1}
    if config.moe_router_group_score_topk != 2:
        raise unsupported_field(
            "moe_router_group_score_topk", "2", config.moe_router_group_score_topk
        )
    return {"n_group": config.moe_router_num_groups, "topk_group": config.moe_router_group_topk}


def expert_groups(groups: int, chosen: int) -> Custom:
    """Returns the setting of groups of experts.

    Args:
        groups: Number of groups of a file without it.
        chosen: Number of groups of which experts are selected, of a file without it.
    """
    read = partial(_groups_from_hf, groups=groups, chosen=chosen)
    return Custom(GROUPS, ("n_group", "topk_group"), read, _groups_to_hf)


def released_code(version: str) -> tuple[dict[str, str] | None, ...]:
    """Returns the values of ``auto_map`` in released files, whose code computes the same.

    Args:
        version: The version in names of classes, such as "V3".
    """
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    modules = {"AutoConfig": "configuration_deepseek"}
    return (
        None,
        {
            auto: f"{modules.get(auto, 'modeling_deepseek')}.Deepseek{version}{name}"
            for auto, name in names.items()
        },
    )


#: Depths of multi-token prediction.
DEPTHS = Custom(("mtp_num_layers",), COUNTS, _depths_from_hf, _depths_to_hf)

#: Rotated channels of a head.
ROTATED = Custom(
    ("qk_pos_emb_head_dim",),
    ("qk_rope_head_dim", "head_dim"),
    _rotated_from_hf,
    _rotated_to_hf,
)

SETTINGS = {
    **{
        name: setting
        for name, setting in llama.FAMILY.settings.items()
        if name not in ("kv_channels", "num_query_groups", "norm_epsilon")
    },
    "kv_channels": Derived(),
    "num_query_groups": Derived(),
    "multi_latent_attention": Constant(True),
    "qk_layernorm": Constant(True),
    "kv_lora_rank": Mapped("kv_lora_rank", absent=512),
    "qk_head_dim": Mapped("qk_nope_head_dim", absent=128),
    "v_head_dim": Mapped("v_head_dim", absent=128),
    "add_bias_linear": Constant(False),
}
"""Settings of DeepSeek-V2 and V3."""

#: Epsilon of norms, which those of latents do not read.
EPSILON = Custom(
    ("norm_epsilon", "latent_norm_epsilon"), ("rms_norm_eps",), _epsilon_from_hf, _epsilon_to_hf
)

#: Whether the weights of selected experts are divided by their sum.
NORMALIZATION = Custom(
    ("moe_router_norm_topk_prob",),
    ("norm_topk_prob",),
    _normalization_from_hf,
    _normalization_to_hf,
)

#: Losses of training, and a value that transformers derives from other fields.
WITHOUT_EFFECT = frozenset(
    {
        *("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef"),
        "qk_head_dim",
    }
)
