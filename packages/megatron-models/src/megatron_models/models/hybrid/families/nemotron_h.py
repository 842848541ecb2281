"""Nemotron-H: Mamba-2, attention without positions, and feed-forward layers (NVIDIA, 2025).

Feed-forward layers have a squared ReLU. Those of experts have sigmoid scores with biases and one
shared expert. Depths of multi-token prediction and latents of experts are refused.
"""

from collections.abc import Mapping
from typing import Any, Final

from megatron_models.families.family import Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    Derived,
    HFConfig,
    Mapped,
    Setting,
    Translated,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.families.deepseek_settings import NORMALIZATION, expert_groups
from megatron_models.models.hybrid.fields import HybridFields
from megatron_models.models.mamba.families.rows import mamba_rows

_SYMBOLS: Final = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
_OLDER: Final = {"mamba": "M", "attention": "*"}
"""Names of layers in files of older versions."""

_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_STACK: Operation = ("stack", {"dim": 0})
_BLOCK = "backbone.layers.{i}"
_MIXER = f"{_BLOCK}.mixer"
_MAMBA: Where = {"if": "$mamba_layers"}
_ATTENTION: Where = {"if": "$attention_layers"}
_DENSE: Where = {"if": "$dense_layers"}
_EXPERTS: Where = {"if": "$moe_layers"}


def _simple(ours: str, theirs: str, where: Where, *operations: Operation) -> Row:
    return (f"layers.{{i}}.{ours}", (f"{_BLOCK}.{theirs}",), operations, where)


_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("backbone.embeddings.weight",), (_VOCAB,)),
    _simple("mamba_norm.weight", "norm.weight", _MAMBA),
    *mamba_rows(
        _MIXER,
        where=_MAMBA,
        conv_bias={"if": "$mamba_conv_bias_layers"},
        proj_bias={"if": "$mamba_proj_bias_layers"},
    ),
    _simple("attention_norm.weight", "norm.weight", _ATTENTION),
    (
        "layers.{i}.attention.qkv.weight",
        tuple(f"{_MIXER}.{name}_proj.weight" for name in "qkv"),
        (_QKV,),
        _ATTENTION,
    ),
    _simple("attention.out.weight", "mixer.o_proj.weight", _ATTENTION),
    _simple("mlp_norm.weight", "norm.weight", {"if": "$feed_forward_layers"}),
    _simple("mlp.up.weight", "mixer.up_proj.weight", _DENSE),
    _simple("mlp.down.weight", "mixer.down_proj.weight", _DENSE),
    _simple("mlp.router.weight", "mixer.gate.weight", _EXPERTS),
    _simple("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", _EXPERTS),
    *(
        (
            f"layers.{{i}}.mlp.experts.{name}.weight",
            (f"{_MIXER}.experts.{{e}}.{name}_proj.weight",),
            (_STACK,),
            _EXPERTS,
        )
        for name in ("up", "down")
    ),
    _simple("mlp.shared.up.weight", "mixer.shared_experts.up_proj.weight", _EXPERTS),
    _simple("mlp.shared.down.weight", "mixer.shared_experts.down_proj.weight", _EXPERTS),
    ("final_norm.weight", ("backbone.norm_f.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,)),
)


def _layers_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    found = hf_config.get("layers_block_type")
    if found is None and hf_config.get("hybrid_override_pattern") is not None:
        return {"hybrid_layer_pattern": hf_config["hybrid_override_pattern"]}
    if found is None:
        found = ["linear_attention", "moe", "full_attention", "mlp"]
    known = _SYMBOLS | _OLDER
    if not isinstance(found, list) or not all(
        isinstance(each, str) and each in known for each in found
    ):
        raise unsupported_hf_field(title, "layers_block_type", found, [f"lists of {[*_SYMBOLS]}"])
    return {"hybrid_layer_pattern": "".join(known[each] for each in found)}


def _layers_to_hf(config: HybridFields) -> Mapping[str, Any]:
    names = {symbol: name for name, symbol in _SYMBOLS.items()}
    layers = config.pattern.layers
    if other := next((symbol for symbol in layers if symbol not in names), None):
        raise unsupported_field("hybrid_layer_pattern", f"symbols of {''.join(names)}", other)
    return {"layers_block_type": [names[symbol] for symbol in layers]}


_GROUPS = expert_groups(1, 1)
_EXPERT_SETTINGS: Final[Mapping[str, Setting]] = {
    "num_experts": Mapped("n_routed_experts", absent=8),
    "moe_router_topk": Mapped("num_experts_per_tok", absent=2),
    "moe_router_topk_scaling_factor": Mapped("routed_scaling_factor", absent=1.0),
    "moe_ffn_hidden_size": Mapped("moe_intermediate_size", absent=7688),
    "moe_shared_expert_intermediate_size": Mapped(
        "moe_shared_expert_intermediate_size", absent=7688
    ),
    "moe_router_score_function": Constant("sigmoid"),
    "moe_router_enable_expert_bias": Constant(True),
}
"""Settings of models with experts. Without experts the fields have no effect."""


def _experts_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    if "E" not in _layers_from_hf(title, hf_config)["hybrid_layer_pattern"]:
        return {}
    fields = {**_GROUPS.read(title, hf_config), **NORMALIZATION.read(title, hf_config)}
    for name, setting in _EXPERT_SETTINGS.items():
        fields |= setting.read(title, name, hf_config)
    return fields


def _experts_to_hf(config: HybridFields) -> Mapping[str, Any]:
    if not config.num_experts:
        return {}
    found = {**_GROUPS.write(config), **NORMALIZATION.write(config)}
    for name, setting in _EXPERT_SETTINGS.items():
        found |= setting.write(name, config)
    return found


def _all_hf_fields() -> tuple[str, ...]:
    own = [name for setting in _EXPERT_SETTINGS.values() for name in setting.hf_fields]
    return (*own, *_GROUPS.hf_fields, *NORMALIZATION.hf_fields)


FAMILY = Family(
    name="nemotron_h",
    kind="hybrid",
    title="Nemotron-H",
    architectures=("NemotronHForCausalLM",),
    model_type="nemotron_h",
    rows=_ROWS,
    settings={
        "num_layers": Derived(),
        "hidden_size": Mapped("hidden_size", absent=4096),
        "vocab_size": Mapped("vocab_size", absent=131072),
        "max_position_embeddings": Mapped("max_position_embeddings", absent=4096),
        "num_attention_heads": Mapped("num_attention_heads", absent=32),
        "num_query_groups": Mapped("num_key_value_heads", absent=8),
        "kv_channels": Mapped("head_dim", absent=128),
        "ffn_hidden_size": Mapped("intermediate_size", absent=21504),
        "activation": Translated(
            "mlp_hidden_act",
            (("relu2", "squared_relu"), ("relu", "relu"), ("silu", "silu"), ("gelu", "gelu")),
            absent="relu2",
        ),
        "add_bias_linear": Constant(False),
        "mamba_state_dim": Mapped("ssm_state_size", absent=128),
        "mamba_num_heads": Mapped("mamba_num_heads", absent=128),
        "mamba_head_dim": Mapped("mamba_head_dim", absent=64),
        "mamba_num_groups": Mapped("n_groups", absent=8),
        "mamba_conv_kernel": Mapped("conv_kernel", absent=4),
        "mamba_conv_bias": Mapped("use_conv_bias", absent=True),
        "mamba_proj_bias": Mapped("use_bias", absent=False),
        "mamba_dt_min": Mapped("time_step_min", absent=0.001),
        "normalization": Constant("RMSNorm"),
        "norm_epsilon": Mapped("layer_norm_epsilon", absent=1e-5),
        "untie_embeddings_and_output_weights": Constant(True),
        "init_method_std": Mapped("initializer_range", absent=0.02),
    },
    custom=(
        Custom(
            ("hybrid_layer_pattern",),
            ("layers_block_type", "hybrid_override_pattern"),
            _layers_from_hf,
            _layers_to_hf,
        ),
        Custom(
            (*_EXPERT_SETTINGS, *_GROUPS.fields, *NORMALIZATION.fields),
            _all_hf_fields(),
            _experts_from_hf,
            _experts_to_hf,
        ),
    ),
    neutral={
        "mamba_hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "tie_word_embeddings": (False,),  # transformers does not tie them
        "n_shared_experts": (1,),
        "num_nextn_predict_layers": (0,),
        # Other names of head_dim and layer_norm_epsilon, with the values of both if absent.
        "attention_head_dim": (128,),
        "norm_eps": (1e-5,),
        "rms_norm_eps": (1e-5,),
    },
    # Chunks and kernels of the scan, its cache, initial values, and fields that transformers
    # does not read.
    without_effect=frozenset(
        {
            *("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
            *("rescale_prenorm_residual", "residual_in_fp32", "time_step_max", "time_step_floor"),
            *("time_step_limit", "expand", "mamba_proj_bias", "moe_shared_expert_overlap"),
            *("mtp_layers_block_type", "output_router_logits", "num_hidden_layers"),
            *("mtp_hybrid_override_pattern", "time_step_rank", "rope_theta"),
        }
    ),
    exported_constants={
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": False,
    },
    prefix="backbone.",
    published_code={
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModel": "modeling_nemotron_h.NemotronHForCausalLM",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
)
