"""gpt-oss: attention sinks, alternating windows, YaRN, and experts with biases (OpenAI, 2025).

The gate of an expert is an approximate GELU. It and what it multiplies are bounded, and the latter
is moved by 1. Files hold the matrices of all experts in one tensor, input channels first, with
alternating columns of gate and up. Those of MXFP4 are read, too.
"""

from collections.abc import Mapping
from typing import Any, Final

from megatron_models.families.family import Family, Operation, Row
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    Unused,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama, mixtral
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows

_BLOCK = "model.layers.{i}"
_ATTENTION = f"{_BLOCK}.self_attn"
_EXPERTS = f"{_BLOCK}.mlp.experts"
_ROWS_FIRST: Operation = ("transpose", {"dims": [0, 2, 1]})
_PAIRS: Operation = (
    "reshape",
    {
        "shape": ["$num_experts", "$moe_ffn_hidden_size", 2, "$hidden_size"],
        "source": ["$num_experts", -1, "$hidden_size"],
    },
)
_BIAS_PAIRS: Operation = (
    "reshape",
    {
        "shape": ["$num_experts", "$moe_ffn_hidden_size", 2],
        "source": ["$num_experts", -1],
    },
)
_ROWS: tuple[Row, ...] = (
    ("layers.{i}.attention.sinks.weight", (f"{_ATTENTION}.sinks",), ()),
    ("layers.{i}.mlp.router.weight", (f"{_BLOCK}.mlp.router.weight",), ()),
    ("layers.{i}.mlp.router.bias", (f"{_BLOCK}.mlp.router.bias",), ()),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_EXPERTS}.gate_up_proj",),
        (_ROWS_FIRST, _PAIRS, ("transpose", {"dims": [0, 2, 1, 3]})),
    ),
    (
        "layers.{i}.mlp.experts.up.bias",
        (f"{_EXPERTS}.gate_up_proj_bias",),
        (_BIAS_PAIRS, _ROWS_FIRST),
    ),
    ("layers.{i}.mlp.experts.down.weight", (f"{_EXPERTS}.down_proj",), (_ROWS_FIRST,)),
    ("layers.{i}.mlp.experts.down.bias", (f"{_EXPERTS}.down_proj_bias",), ()),
)
_ATTENTION_BIASES = tuple(
    row
    for row in llama.FAMILY.rows
    if row[0] in ("layers.{i}.attention.qkv.bias", "layers.{i}.attention.out.bias")
)

#: Rotary scaling of a file that has none.
_YARN: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ROPE = rope(150000.0)


def _rope_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    if not (hf_config.get("rope_parameters") or hf_config.get("rope_scaling")):
        hf_config = {**hf_config, "rope_scaling": dict(_YARN)}
    return _ROPE.read(title, hf_config)


def _rope_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    found = dict(_ROPE.write(config))
    return found | {"rope_scaling": found["rope_scaling"] or {"rope_type": "default"}}


def _biases_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, bool]:
    attention = hf_config.get("attention_bias", True)
    if attention not in (False, True):
        raise unsupported_hf_field(title, "attention_bias", attention, [False, True])
    return {"add_bias_linear": bool(attention), "add_mlp_bias": not attention}


def _biases_to_hf(config: GPTConfig) -> Mapping[str, bool]:
    attention = config.has_qkv_bias
    if config.has_attention_out_bias != attention:
        raise unsupported_field(
            "has_attention_out_bias", repr(attention), config.has_attention_out_bias
        )
    if not config.has_mlp_bias:
        raise unsupported_field("has_mlp_bias", "True", False)
    return {"attention_bias": attention}


def _limit_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    limit = hf_config.get("swiglu_limit", 7.0)
    if limit is None or limit == 0:  # they would bound all values to 0, ours none
        raise unsupported_hf_field(title, "swiglu_limit", limit, ["a number above 0"])
    return {"activation_func_clamp_value": limit}


def _limit_to_hf(config: GPTConfig) -> Mapping[str, float]:
    limit = config.activation_func_clamp_value
    if not limit:
        raise unsupported_field("activation_func_clamp_value", "a number above 0", limit)
    return {"swiglu_limit": limit}


FAMILY = Family(
    name="gpt_oss",
    kind="gpt",
    title="gpt-oss",
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    rows=(*llama.START_ROWS, *_ATTENTION_BIASES, *llama.HEAD_ROWS, *_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=8, null=0),
        "kv_channels": Mapped("head_dim", absent=64, null=0),
        "norm_epsilon": Mapped("rms_norm_eps", absent=1e-5),
        "activation": Constant("quick_geglu"),
        "glu_linear_offset": Constant(1.0),
        "softmax_type": Constant("learnable"),
        "ffn_hidden_size": Unused("intermediate_size"),
        "moe_ffn_hidden_size": Mapped("intermediate_size"),
        "num_experts": Mapped("num_local_experts", absent=128),
        "moe_router_topk": Mapped("num_experts_per_tok", absent=4),
        "moe_router_pre_softmax": Constant(False),
        "moe_router_add_bias": Constant(True),
    },
    custom=(
        Custom(_ROPE.fields, _ROPE.hf_fields, read=_rope_from_hf, write=_rope_to_hf),
        windows(except_every(2), absent=128),
        Custom(
            ("add_bias_linear", "add_qkv_bias", "add_attention_out_bias", "add_mlp_bias"),
            ("attention_bias",),
            read=_biases_from_hf,
            write=_biases_to_hf,
        ),
        Custom(
            ("activation_func_clamp_value",),
            ("swiglu_limit",),
            read=_limit_from_hf,
            write=_limit_to_hf,
        ),
        mixtral.EVERY_LAYER,
    ),
    # 1.702 is the factor in the approximation of GELU.
    neutral={"swiglu_alpha": (1.702,)},
    # The first is not read by transformers, and others repeat or belong to the training.
    without_effect=frozenset(
        {
            "hidden_act",
            "initial_context_length",
            "experts_per_token",
            "output_router_logits",
            "router_aux_loss_coef",
        }
    ),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored[:1],
    prefix="model.",
)
