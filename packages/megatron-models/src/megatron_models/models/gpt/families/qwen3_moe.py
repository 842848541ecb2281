"""Qwen3-MoE: Qwen3's attention, and experts in some or all layers (Qwen team, 2025).

Files hold the matrices of each expert separately. Scores are a softmax over all experts; divided by
their sum, those of the selected experts are a softmax over the selected logits.
"""

import reprlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Operation, Row, Where
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    Translated,
    unsupported_hf_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.qwen3 import ATTENTION_ROWS
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import windows

_MLP = "model.layers.{i}.mlp"
_EXPERT = f"{_MLP}.experts.{{e}}"
_STACK: Operation = ("stack", {"dim": 0})
_GATE_UP: Operation = (
    "reshape",
    {
        "shape": ["$num_experts", 2, "$moe_ffn_hidden_size", "$hidden_size"],
        "source": [-1, "$moe_ffn_hidden_size", "$hidden_size"],
    },
)
_EXPERTS: Where = {"if": "$moe_layers"}
_MOST_LAYERS = 100_000  # the configuration refuses more

#: Rows of feed-forward layers: dense ones, and routers with experts.
FEED_FORWARD_ROWS: tuple[Row, ...] = (
    *((*row[:3], {"unless": "$moe_layers"}) for row in llama.DENSE_ROWS),
    ("layers.{i}.mlp.router.weight", (f"{_MLP}.gate.weight",), (), _EXPERTS),
    (
        "layers.{i}.mlp.experts.up.weight",
        (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        (_STACK, _GATE_UP),
        _EXPERTS,
    ),
    ("layers.{i}.mlp.experts.down.weight", (f"{_EXPERT}.down_proj.weight",), (_STACK,), _EXPERTS),
)


def pattern(experts: Sequence[bool]) -> str:
    """Returns the pattern of layers with experts for ``moe_layer_freq``."""
    return "1" if all(experts) else str([int(each) for each in experts])


def _layers_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, str]:
    count, step = hf_config.get("num_hidden_layers"), hf_config.get("decoder_sparse_step", 1)
    dense = hf_config.get("mlp_only_layers") or []
    if type(count) is not int or not 0 < count <= _MOST_LAYERS:
        return {}
    if type(step) is not int or step < 1:
        raise unsupported_hf_field(title, "decoder_sparse_step", step, ["numbers of at least 1"])
    if not isinstance(dense, list) or any(type(each) is not int for each in dense):
        raise unsupported_hf_field(title, "mlp_only_layers", dense, ["numbers of layers"])
    without = {*dense}
    experts = [layer not in without and (layer + 1) % step == 0 for layer in range(count)]
    if not any(experts):
        raise ConfigError(
            f"{title} models with mlp_only_layers = {reprlib.repr(dense)} and decoder_sparse_step ="
            f" {step} have no experts; they are not supported"
        )
    return {"moe_layer_freq": pattern(experts)}


def _layers_to_hf(config: GPTConfig) -> Mapping[str, Any]:
    dense = [layer for layer, experts in enumerate(config.moe_layers) if not experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


#: The layers with experts: every so many, except those in a list.
LAYERS = Custom(
    ("moe_layer_freq",),
    ("decoder_sparse_step", "mlp_only_layers"),
    read=_layers_from_hf,
    write=_layers_to_hf,
)


def _experts_from_hf(title: str, hf_config: HFConfig, *, absent: int) -> Mapping[str, Any]:
    given = [hf_config.get(name) for name in ("num_experts", "num_local_experts")]
    found = [each for each in given if each is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError(
            f"{title} models with num_experts = {reprlib.repr(found[0])} and num_local_experts = "
            f"{reprlib.repr(found[1])} are not supported; give one of them"
        )
    if found[:1] == [0]:
        raise unsupported_hf_field(title, "num_experts", 0, ["numbers above 0"])
    return {"num_experts": found[0] if found else absent}


def experts(absent: int) -> Custom:
    """Returns the setting of the number of experts, which transformers 5 writes by another name.

    Args:
        absent: Their number in a file without it.
    """
    return Custom(
        ("num_experts",),
        ("num_experts", "num_local_experts"),
        read=partial(_experts_from_hf, absent=absent),
        write=lambda config: {"num_experts": config.num_experts},
    )


FAMILY = Family(
    name="qwen3_moe",
    kind="gpt",
    title="Qwen3-MoE",
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    rows=(*llama.START_ROWS, *ATTENTION_ROWS, *FEED_FORWARD_ROWS, *llama.HEAD_ROWS),
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=4, null=0),
        "qk_layernorm": Constant(True),
        "moe_ffn_hidden_size": Mapped("moe_intermediate_size", absent=768),
        "moe_router_topk": Mapped("num_experts_per_tok", absent=8),
        "moe_router_pre_softmax": Translated(
            "norm_topk_prob", ((True, False), (False, True), (None, True)), absent=False
        ),
    },
    custom=(
        rope(10000.0),
        windows(absent=4096, switch=False, listed=False),
        attention_bias(absent=False, mlp=False),
        experts(128),
        LAYERS,
    ),
    # Options of other Qwen models, in the files of Qwen3-Coder.
    neutral={"use_qk_norm": (True,), "shared_expert_intermediate_size": (0,)},
    # Losses of the router belong to training.
    without_effect=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored[:1],
    prefix="model.",
)
