"""DeepSeek-V3: multi-latent attention and sigmoid routing with biases (DeepSeek-AI, 2024).

Files hold the matrices of each expert separately. The norms of latents have an epsilon of 1e-6 for
every ``rms_norm_eps``, so other values are refused.

``num_nextn_predict_layers`` counts the depths of multi-token prediction. transformers counts them
in every ``config.json`` but writes no tensors of them; such a file is read as a model without them.
A file with their tensors repeats the embedding and the output matrix at each depth; copies that
differ are refused.
"""

from functools import partial
from typing import Any

from megatron_models.families.family import UNTIED, Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    Derived,
    HFConfig,
    Mapped,
    Translated,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope

_ATTENTION = "model.layers.{i}.self_attn"
_MLP = "model.layers.{i}.mlp"
_EXPERT = f"{_MLP}.experts.{{e}}"
_STACK: Operation = ("stack", {"dim": 0})
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_LATENT: Where = {"if": "$has_query_latent"}
_EXPERTS: Where = {"if": "$moe_layers"}
_WORDS = {False: "no", True: "yes"}
GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
_DENSE: Where = {"unless": "$moe_layers"}


_QUERIES: Operation = (
    "reshape",
    {"shape": ["$num_attention_heads", "$kv_channels", -1], "source": ["$query_size", -1]},
)
_KEYS_VALUES: Operation = (
    "reshape",
    {"shape": ["$num_attention_heads", -1, "$kv_lora_rank"], "source": [-1, "$kv_lora_rank"]},
)

_ATTENTION_ROWS: tuple[Row, ...] = (
    *(
        (f"layers.{{i}}.attention.{ours}", (f"{_ATTENTION}.{theirs}",), ops, where)
        for ours, theirs, ops, where in (
            (
                "q.weight",
                "q_proj.weight",
                (_QUERIES,),
                {"unless": "$has_query_latent"},
            ),
            ("q_down.weight", "q_a_proj.weight", (), _LATENT),
            ("q_down.bias", "q_a_proj.bias", (), {"if": "$has_query_latent_bias"}),
            ("q_norm.weight", "q_a_layernorm.weight", (), _LATENT),
            ("q_up.weight", "q_b_proj.weight", (_QUERIES,), _LATENT),
            ("kv_down.bias", "kv_a_proj_with_mqa.bias", (), {"if": "$add_qkv_bias"}),
            ("out.bias", "o_proj.bias", (), {"if": "$has_attention_out_bias"}),
        )
    ),
    *(
        (f"layers.{{i}}.attention.{ours}", (f"{_ATTENTION}.{theirs}",), ops)
        for ours, theirs, ops in (
            ("kv_down.weight", "kv_a_proj_with_mqa.weight", ()),
            ("kv_norm.weight", "kv_a_layernorm.weight", ()),
            ("kv_up.weight", "kv_b_proj.weight", (_KEYS_VALUES,)),
            ("out.weight", "o_proj.weight", ()),
        )
    ),
)


def _feed_forward(ours: str, theirs: str, where: Where) -> tuple[Row, Row]:
    gate_up = tuple(f"{theirs}.{name}_proj.weight" for name in ("gate", "up"))
    return (
        (f"layers.{{i}}.{ours}.up.weight", gate_up, (_STACK,), where),
        (f"layers.{{i}}.{ours}.down.weight", (f"{theirs}.down_proj.weight",), (), where),
    )


#: All rows of DeepSeek-V2, and of V3 but for the biases of experts.
ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight",), (_VOCAB,)),
    ("layers.{i}.attention_norm.weight", ("model.layers.{i}.input_layernorm.weight",), ()),
    ("layers.{i}.mlp_norm.weight", ("model.layers.{i}.post_attention_layernorm.weight",), ()),
    *_ATTENTION_ROWS,
    *_feed_forward("mlp", _MLP, _DENSE),
    *_feed_forward("mlp.shared", f"{_MLP}.shared_experts", _EXPERTS),
    ("layers.{i}.mlp.router.weight", (f"{_MLP}.gate.weight",), (), _EXPERTS),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        (
            _STACK,
            (
                "reshape",
                {
                    "shape": ["$num_experts", 2, "$moe_ffn_hidden_size", "$hidden_size"],
                    "source": [-1, "$moe_ffn_hidden_size", "$hidden_size"],
                },
            ),
        ),
        _EXPERTS,
    ),
    (
        "layers.{i}.mlp.experts.down.weight",
        (f"{_EXPERT}.down_proj.weight",),
        (_STACK,),
        _EXPERTS,
    ),
    ("final_norm.weight", ("model.norm.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
)


def _of_depth(row: Row) -> Row:
    """Returns the row of multi-token prediction for that of a layer with experts."""
    ours, theirs, operations, *rest = row
    where = rest[0] if rest else {}
    return (
        "".join(ours).replace("layers.{i}.", "mtp.{m}.layer."),
        tuple(name.replace("{i}", "{m}") for name in theirs),
        operations,
        {} if where == _EXPERTS else where,
    )


_BIASES: Row = (
    "layers.{i}.mlp.router.expert_bias",
    (f"{_MLP}.gate.e_score_correction_bias",),
    (),
    _EXPERTS,
)
_EMBEDDING, _HEAD = (
    "model.layers.{m}.embed_tokens.weight",
    "model.layers.{m}.shared_head.head.weight",
)
_TIED: Operation = ("tie", {})

#: Embedding and output matrix with their copies in the layers of multi-token prediction.
_SHARED_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("model.embed_tokens.weight", _EMBEDDING), (_TIED, _VOCAB), UNTIED),
    (
        "embedding.word.weight",
        ("model.embed_tokens.weight", _EMBEDDING, _HEAD),
        (_TIED, _VOCAB),
        {"unless": "$untie_embeddings_and_output_weights"},
    ),
    ("output.weight", ("lm_head.weight", _HEAD), (_TIED, _VOCAB), UNTIED),
)
_DEPTH_ROWS: tuple[Row, ...] = (
    *(
        (f"mtp.{{m}}.{ours}.weight", (f"model.layers.{{m}}.{theirs}.weight",), ())
        for ours, theirs in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_norm", "shared_head.norm"),
        )
    ),
    *(_of_depth(row) for row in (*ROWS, _BIASES) if "{i}" in row[0] and row[3:] != (_DENSE,)),
)


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
    given = {name: _integer(title, hf_config, name, 1) for name in _COUNTS if name in hf_config}
    count = next(iter(given.values()), 1)  # transformers counts one if the file counts none
    for name, other in given.items():
        if other != count:
            raise unsupported_hf_field(title, name, other, [count])
    dense = _integer(title, hf_config, "first_k_dense_replace", 3)
    if count and dense >= _integer(title, hf_config, "num_hidden_layers", 0):
        return {}  # their layers have experts, unlike all layers of this model
    return {"mtp_num_layers": count}


def _depths_to_hf(config: GPTConfig) -> dict[str, int]:
    return {_COUNTS[0]: config.mtp_num_layers}


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


SETTINGS = {
    **{
        name: setting
        for name, setting in llama.FAMILY.settings.items()
        if name not in ("kv_channels", "num_query_groups")
    },
    "kv_channels": Derived(),
    "num_query_groups": Derived(),
    "multi_latent_attention": Constant(True),
    "qk_layernorm": Constant(True),
    "kv_lora_rank": Mapped("kv_lora_rank", absent=512),
    "qk_head_dim": Mapped("qk_nope_head_dim", absent=128),
    "v_head_dim": Mapped("v_head_dim", absent=128),
    "norm_epsilon": Translated("rms_norm_eps", ((1e-6, 1e-6),), absent=1e-6),
    "add_bias_linear": Constant(False),
}
"""Settings of DeepSeek-V2 and V3."""

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

FAMILY = Family(
    name="deepseek_v3",
    kind="gpt",
    title="DeepSeek-V3",
    version=1,
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    rows=(
        *_SHARED_ROWS,
        *(row for row in ROWS if row[0] not in ("embedding.word.weight", "output.weight")),
        _BIASES,
        *_DEPTH_ROWS,
    ),
    settings={
        **SETTINGS,
        "rotary_interleaved": Translated(
            "rope_interleave", ((True, True), (False, False), (None, False)), absent=True
        ),
        "num_experts": Mapped("n_routed_experts", absent=256),
        "moe_router_topk": Mapped("num_experts_per_tok", absent=8),
        "moe_router_topk_scaling_factor": Mapped("routed_scaling_factor", absent=2.5),
        "moe_router_score_function": Constant("sigmoid"),
        "moe_router_enable_expert_bias": Constant(True),
    },
    custom=(
        rope(10000.0, latent=True),
        attention(128),
        Custom(
            ("qk_pos_emb_head_dim",),
            ("qk_rope_head_dim", "head_dim"),
            _rotated_from_hf,
            _rotated_to_hf,
        ),
        dense_layers(3),
        shared_experts(1, 2048),
        expert_groups(8, 4),
        NORMALIZATION,
        Custom(("mtp_num_layers",), _COUNTS, _depths_from_hf, _depths_to_hf),
    ),
    if_absent={"model.layers.{i}.eh_proj.weight": dict.fromkeys(_COUNTS, 0)},
    neutral={
        "auto_map": released_code("V3"),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "pretraining_tp": (1,),
    },
    without_effect=WITHOUT_EFFECT,
    exported_constants={"attention_dropout": 0.0},
    prefix="model.",
)
