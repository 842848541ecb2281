"""Mixtral: Llama's attention, and a mixture of SwiGLU experts in every layer (Jiang et al., 2024).

Files hold each expert's three matrices by themselves: ``w1`` is the gate, ``w3`` up, ``w2`` down.
Softmax over all experts, renormalised over the chosen ones, is softmax over the chosen logits; of
one chosen expert it is 1.
"""

from collections.abc import Mapping
from typing import Any

from megatron_models.config import GPTConfig
from megatron_models.families import llama
from megatron_models.families.family import Family, Operation, Row, need, refuse_unless, require

_MOE = "model.layers.{i}.block_sparse_moe"
_EXPERT = f"{_MOE}.experts.{{e}}"
_STACK: Operation = ("stack", {"dim": 0})
_GATE_UP: Operation = (
    "reshape",
    {
        "shape": ["$num_experts", 2, "$moe_ffn_hidden_size", "$hidden_size"],
        "source": [-1, "$moe_ffn_hidden_size", "$hidden_size"],
    },
)

_DENSE = ("layers.{i}.mlp.up.", "layers.{i}.mlp.down.")
_EXPERTS: tuple[Row, ...] = (
    ("layers.{i}.mlp.router.weight", (f"{_MOE}.gate.weight",), ()),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),
        (_STACK, _GATE_UP),
    ),
    ("layers.{i}.mlp.experts.down.weight", (f"{_EXPERT}.w2.weight",), (_STACK,)),
)
_ROWS = (
    tuple(
        row
        for row in llama.FAMILY.rows
        if not row[0].startswith(_DENSE) and not row[0].endswith(".bias")
    )
    + _EXPERTS
)

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "norm_topk_prob": (None, True),
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "n_group": (None, 1),
    "routed_scaling_factor": (None, 1, 1.0),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "first_k_dense_replace": (None, 0),
    "moe_layer_freq": (None, 1),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
}


def config_from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """Read the content of a Mixtral ``config.json``.

    What only training uses is not part of the model: weights of its losses, and router noise.
    """
    refuse_unless(values, _ALLOWED, "Mixtral")
    dense = llama.config_from_hf({**values, "attention_bias": False, "mlp_bias": False})
    experts = {
        "num_experts": need(values, "num_local_experts", "Mixtral"),
        "moe_router_topk": need(values, "num_experts_per_tok", "Mixtral"),
        "moe_ffn_hidden_size": dense.ffn_hidden_size,
    }
    return GPTConfig.from_dict(dense.to_dict() | experts)


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Make the content of a Mixtral ``config.json``."""
    wanted = {
        "moe_layers": (True,) * config.num_layers,
        "moe_shared_expert_intermediate_size": 0,
        "moe_router_pre_softmax": False,
        "has_qkv_bias": False,
        "has_attention_out_bias": False,
        "has_mlp_bias": False,
    }
    require(config, wanted, "Mixtral")
    plain = {name: value for name, value in config.to_dict().items() if not name.startswith("moe_")}
    plain |= {"num_experts": 0, "ffn_hidden_size": config.moe_ffn_hidden_size}
    dense = llama.config_to_hf(GPTConfig.from_dict(plain))
    del dense["mlp_bias"], dense["attention_bias"]
    return dense | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "sliding_window": None,
    }


FAMILY = Family(
    name="mixtral",
    version=1,
    architectures=("MixtralForCausalLM",),
    rows=_ROWS,
    config_to_hf=config_to_hf,
    config_from_hf=config_from_hf,
    conditions={"output.weight": "untie_embeddings_and_output_weights"},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
