"""A wrong configuration, and the settings that several have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SMALL: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 40,
}

ROPE: Mapping[str, Any] = {"position_embedding_type": "rope"}

EXPERTS: Mapping[str, Any] = {"num_experts": 8}

PRE: Mapping[str, Any] = {**EXPERTS, "moe_router_pre_softmax": True}

GROUPS: Mapping[str, Any] = {**PRE, "moe_router_num_groups": 4, "moe_router_group_topk": 2}

CHOICE: Mapping[str, Any] = {**PRE, "moe_router_expert_choice": True}

SINKHORN: Mapping[str, Any] = {**PRE, "moe_router_load_balancing_type": "sinkhorn"}

LATENT: Mapping[str, Any] = {
    **ROPE,
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}

LINEAR: Mapping[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "2",
}

TEMPERATURE: Mapping[str, Any] = {"attn_temperature_scale": 0.5}


@dataclass(frozen=True)
class Case:
    """A wrong configuration.

    Attributes:
        fields: The fields that differ from `SMALL`.
        words: What the error contains, joined by ``|``: fields, values, the rule, the remedy.
        fix: The fields that the error advises, with which the configuration is accepted. None takes
            a field out.
        layout: The parallel sizes, for a layout that does not fit the model.
        fixed_layout: The parallel sizes that the error advises.
        kind: Kind of the model.
    """

    fields: Mapping[str, Any]
    words: str
    fix: Mapping[str, Any] | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    fixed_layout: Mapping[str, Any] | None = None
    kind: str = "gpt"


def blocks(first: str) -> dict[str, str]:
    """Returns the fields of a model whose first layer differs."""
    return {"heterogeneous_layers_config_encoded_json": f"[{first}, {{}}, {{}}, {{}}]"}
