"""Qwen3-Next: gated delta nets in most layers, gated attention in the others (Qwen team, 2025).

Each head of the queries is followed by its gate. The projections of gated delta nets are ordered by
key head, like ours; their convolution is ordered by queries, keys and values of all heads.

Released files have one layer for multi-token prediction (``mtp.*``), which their ``config.json``
need not count and transformers skips. A file without its tensors is read as a model without it.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    Translated,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama, qwen3_moe
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.rope import rope

_BLOCK = "model.layers.{i}"
_DELTA: Where = {"if": "$linear_layers"}
_ATTENTION: Where = {"unless": "$linear_layers"}
_EXPERTS: Where = {"if": "$moe_layers"}
_DEPTHS = "num_nextn_predict_layers"
_TYPES = "layer_types"
_INTERVAL = "full_attention_interval"
_KINDS = {True: "linear_attention", False: "full_attention"}
_MOST_LAYERS = 100_000  # the configuration refuses more

_QKV: Operation = (
    "interleave_qkv",
    {
        "heads": "$num_attention_heads",
        "groups": "$num_query_groups",
        "head_dim": "$kv_channels",
        "parts": 2,
    },
)
_HEADS: Operation = (
    "reshape",
    {"shape": ["$linear_num_key_heads", -1, "$hidden_size"], "source": [-1, "$hidden_size"]},
)
_ROLES: Operation = (
    "segments",
    {"dim": 0, "sizes": ["$linear_key_size", "$linear_key_size", "$linear_value_size"]},
)
_BY_HEAD: Operation = (
    "interleave",
    {
        "dim": 0,
        "blocks": "$linear_num_key_heads",
        "sizes": ["$linear_key_head_dim", "$linear_key_head_dim", "$linear_group_value_size"],
    },
)
_FILTERS: Operation = (
    "reshape",
    {
        "shape": ["$linear_num_key_heads", -1, "$linear_conv_kernel_dim"],
        "source": [-1, 1, "$linear_conv_kernel_dim"],
    },
)


def _attention(part: str) -> tuple[Row, ...]:
    """Returns the rows of weights or biases of attention, which some layers have."""
    weight = part == "weight"
    names = tuple(f"{_BLOCK}.self_attn.{name}_proj.{part}" for name in "qkv")
    where = {} if weight else {"if": "$has_qkv_bias"}
    out = {} if weight else {"if": "$has_attention_out_bias"}
    return (
        (f"layers.{{i}}.attention.qkv.{part}", names, (_QKV,), {**_ATTENTION, **where}),
        (
            f"layers.{{i}}.attention.out.{part}",
            (f"{_BLOCK}.self_attn.o_proj.{part}",),
            (),
            {**_ATTENTION, **out},
        ),
    )


def _delta(ours: str, theirs: tuple[str, ...], *operations: Operation) -> Row:
    """Returns the row of a tensor of gated delta nets."""
    names = tuple(f"{_BLOCK}.linear_attn.{name}" for name in theirs)
    return (f"layers.{{i}}.attention.{ours}", names, operations, _DELTA)


_ROWS: tuple[Row, ...] = (
    *llama.START_ROWS[:3],  # embedding and norms of layers
    *_attention("weight"),
    *_attention("bias"),
    *(
        (
            f"layers.{{i}}.attention.{name}.weight",
            (f"{_BLOCK}.self_attn.{name}.weight",),
            (),
            _ATTENTION,
        )
        for name in ("q_norm", "k_norm")
    ),
    _delta(
        "in_proj.weight",
        ("in_proj_qkvz.weight", "in_proj_ba.weight"),
        _HEADS,
        ("concat", {"dim": 1, "sizes": ["$linear_group_gated_size", "$linear_group_logit_size"]}),
    ),
    _delta("conv_weight", ("conv1d.weight",), _ROLES, _BY_HEAD, _FILTERS),
    _delta("A_log", ("A_log",)),
    _delta("dt_bias", ("dt_bias",)),
    _delta("norm.weight", ("norm.weight",)),
    _delta("out_proj.weight", ("out_proj.weight",)),
    *qwen3_moe.FEED_FORWARD_ROWS,
    (
        "layers.{i}.mlp.shared.up.weight",
        tuple(f"{_BLOCK}.mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up")),
        (("stack", {"dim": 0}),),
        _EXPERTS,
    ),
    (
        "layers.{i}.mlp.shared.down.weight",
        (f"{_BLOCK}.mlp.shared_expert.down_proj.weight",),
        (),
        _EXPERTS,
    ),
    (
        "layers.{i}.mlp.shared_gate.weight",
        (f"{_BLOCK}.mlp.shared_expert_gate.weight",),
        (),
        _EXPERTS,
    ),
    *llama.HEAD_ROWS,
)


def _of_depth(row: Row) -> Row:
    """Returns the row of multi-token prediction for that of a layer with attention and experts."""
    ours, theirs, operations, *rest = row
    where = {
        key: value
        for key, value in (rest[0] if rest else {}).items()
        if value not in ("$moe_layers", "$linear_layers")
    }
    return (
        "".join(ours).replace("layers.{i}.", "mtp.{m}.layer."),
        tuple(name.replace(_BLOCK, "mtp.layers.0") for name in theirs),
        operations,
        where,
    )


def _in_depth(row: Row) -> bool:
    """Returns whether a layer with attention and experts has a row."""
    where = row[3] if len(row) == 4 else {}
    return (
        "{i}" in row[0]
        and where.get("if") != "$linear_layers"
        and where.get("unless") != "$moe_layers"
    )


_DEPTH_ROWS: tuple[Row, ...] = (
    *(
        (f"mtp.{{m}}.{ours}.weight", (f"mtp.{theirs}.weight",), ())
        for ours, theirs in (
            ("enorm", "pre_fc_norm_embedding"),
            ("hnorm", "pre_fc_norm_hidden"),
            ("eh_proj", "fc"),
            ("final_norm", "norm"),
        )
    ),
    *(_of_depth(row) for row in _ROWS if _in_depth(row)),
)


def _layers_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, str]:
    count, types = hf_config.get("num_hidden_layers"), hf_config.get(_TYPES)
    if type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return {}
    if types is None:
        every = hf_config.get(_INTERVAL, 4)
        if type(every) is not int or every < 1:
            raise ConfigError(
                f"{title} models with {_INTERVAL} = {reprlib.repr(every)} are not supported; give "
                "a number of at least 1"
            )
        types = [_KINDS[number % every != 0] for number in range(1, count + 1)]
    known = isinstance(types, list) and len(types) == count
    if not known or any(each not in _KINDS.values() for each in types):
        raise ConfigError(
            f"{title} models with {_TYPES} = {reprlib.repr(types)} are not supported; give "
            f"{' or '.join(map(repr, _KINDS.values()))} for each layer"
        )
    linear = [each == _KINDS[True] for each in types]
    if not any(linear):
        raise ConfigError(
            f"{title} models with {_TYPES} = {reprlib.repr(types)} have no linear attention; they "
            "are not supported"
        )
    found: dict[str, Any] = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": str([int(each) for each in linear]),
    }
    depths = hf_config.get(_DEPTHS, 1)
    if type(depths) is not int or depths not in (0, 1):
        raise unsupported_hf_field(title, _DEPTHS, depths, [0, 1])
    dense = hf_config.get("mlp_only_layers") or []
    # A depth has attention and experts, and equals the last layer of a model of ours.
    return found | {"mtp_num_layers": 0 if linear[-1] or count - 1 in dense else depths}


def _layers_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    depths = config.mtp_num_layers
    if depths > 1:
        raise unsupported_field("mtp_num_layers", "0 or 1", depths)
    if depths and (config.linear_layers[-1] or not config.moe_layers[-1]):
        raise unsupported_field("mtp_num_layers", "0", depths)
    return {_TYPES: [_KINDS[each] for each in config.linear_layers], _DEPTHS: depths}


_LAYERS = Custom(
    ("experimental_attention_variant", "linear_attention_freq", "mtp_num_layers"),
    (_TYPES, _INTERVAL, _DEPTHS, "mlp_only_layers"),
    read=_layers_from_hf,
    write=_layers_to_hf,
)

FAMILY = Family(
    name="qwen3_next",
    kind="gpt",
    title="Qwen3-Next",
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    rows=(*_ROWS, *_DEPTH_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=2),
        "kv_channels": Mapped("head_dim", absent=256),
        "qk_layernorm": Constant(True),
        "apply_layernorm_1p": Constant(True),
        "attention_output_gate": Constant(True),
        "linear_conv_kernel_dim": Mapped("linear_conv_kernel_dim", absent=4),
        "linear_key_head_dim": Mapped("linear_key_head_dim", absent=128),
        "linear_value_head_dim": Mapped("linear_value_head_dim", absent=128),
        "linear_num_key_heads": Mapped("linear_num_key_heads", absent=16),
        "linear_num_value_heads": Mapped("linear_num_value_heads", absent=32),
        "moe_ffn_hidden_size": Mapped("moe_intermediate_size", absent=512),
        "moe_shared_expert_intermediate_size": Mapped(
            "shared_expert_intermediate_size", absent=512
        ),
        "moe_shared_expert_gate": Constant(True),
        "moe_router_topk": Mapped("num_experts_per_tok", absent=10),
        "moe_router_pre_softmax": Translated(
            "norm_topk_prob", ((True, False), (False, True), (None, True)), absent=True
        ),
    },
    custom=(
        rope(10000.0, percent=0.25),
        attention_bias(absent=False, mlp=False),
        qwen3_moe.experts(512),
        qwen3_moe.LAYERS,
        _LAYERS,
    ),
    if_absent={"mtp.fc.weight": {_DEPTHS: 0}},
    # Losses of the router belong to training.
    without_effect=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored[:1],
    prefix="model.",
)
