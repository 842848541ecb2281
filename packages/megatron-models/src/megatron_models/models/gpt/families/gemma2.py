"""Gemma 2: norms around each sublayer, windows in every other layer, bounded scores and logits.

Gemma Team, 2024. Gains of norms are stored as their difference from 1, and token embeddings are
multiplied by the square root of the hidden size.
"""

import math
import reprlib

from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Row
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    Translated,
    unsupported_field,
)
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.qwen3 import ATTENTION_ROWS
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows

_NORMS = {
    "attention_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
}

#: Rows before the norms of queries and keys, which only Gemma 3 has.
START_ROWS: tuple[Row, ...] = (
    *(row for row in llama.START_ROWS if row[0] != "layers.{i}.mlp_norm.weight"),
    *(
        (f"layers.{{i}}.{name}.weight", (f"model.layers.{{i}}.{hf_name}.weight",), ())
        for name, hf_name in _NORMS.items()
    ),
)
_BIAS_ROWS = tuple(row for row in ATTENTION_ROWS if str(row[0]).endswith(".bias"))


def _number(title: str, name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(
            f"{title} models with {name} = {reprlib.repr(value)} are not supported; give a "
            "positive number"
        )
    return float(value)  # type: ignore[arg-type]


def _multiplier_from_hf(title: str, hf_config: HFConfig) -> dict[str, float]:
    return {"embedding_multiplier": _number(title, "hidden_size", hf_config["hidden_size"]) ** 0.5}


def _multiplier_to_hf(config: GPTConfig) -> dict[str, float]:
    expected, found = config.hidden_size**0.5, config.embedding_multiplier
    if not math.isclose(found, expected, rel_tol=1e-6):
        raise unsupported_field("embedding_multiplier", repr(expected), found)
    return {}


_SCALAR, _DEFAULT_SCALAR = "query_pre_attn_scalar", 256


def _scale_from_hf(title: str, hf_config: HFConfig) -> dict[str, float]:
    scalar = _number(title, _SCALAR, hf_config.get(_SCALAR, _DEFAULT_SCALAR))
    return {"softmax_scale": scalar**-0.5}


def _scale_to_hf(config: GPTConfig) -> dict[str, int]:
    scale = config.softmax_scale or config.kv_channels**-0.5
    scalar = round(scale**-2)
    if scalar < 1 or not math.isclose(scalar**-0.5, scale, rel_tol=1e-6):
        raise unsupported_field("softmax_scale", "1 / sqrt(n) with a whole number n", scale)
    return {_SCALAR: scalar}


def softcap(field: str, absent: float | None) -> Custom:
    """Returns the setting of a bound, which their files name as this package does.

    Args:
        field: Our field, in which 0 means none; theirs has null instead.
        absent: Their value in a file without the field.
    """

    def read(title: str, hf_config: HFConfig) -> dict[str, float]:
        given = hf_config.get(field, absent)
        return {field: 0.0 if given is None else _number(title, field, given)}

    def write(config: GPTConfig) -> dict[str, float | None]:
        return {field: getattr(config, field) or None}

    return Custom(fields=(field,), hf_fields=(field,), read=read, write=write)


#: The factors of embeddings and scores.
FACTORS = (
    Custom(("embedding_multiplier",), ("hidden_size",), _multiplier_from_hf, _multiplier_to_hf),
    Custom(("softmax_scale",), (_SCALAR,), _scale_from_hf, _scale_to_hf),
)
#: The settings of Gemma 2 and 3.
SETTINGS = {
    **llama.FAMILY.settings,
    "num_query_groups": Mapped("num_key_value_heads", absent=4),
    "kv_channels": Mapped("head_dim", absent=256),
    "activation": Translated(
        "hidden_activation",
        (
            ("gelu_pytorch_tanh", "geglu_tanh"),
            ("gelu_new", "geglu_tanh"),
            ("gelu", "geglu"),
            ("silu", "swiglu"),
            ("relu", "reglu"),
        ),
        absent="gelu_pytorch_tanh",
    ),
    "untie_embeddings_and_output_weights": Translated(
        "tie_word_embeddings", ((True, False), (False, True)), absent=True
    ),
    "apply_layernorm_1p": Constant(True),
    "norm_placement": Constant("sandwich"),
}
#: Fields of their files that their classes do not read.
UNREAD = frozenset({"hidden_act", "cache_implementation"})

FAMILY = Family(
    name="gemma2",
    kind="gpt",
    title="Gemma 2",
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    rows=(*START_ROWS, *_BIAS_ROWS, *llama.DENSE_ROWS, *llama.HEAD_ROWS),
    settings=SETTINGS,
    custom=(
        rope(10000.0),
        windows(except_every(2), absent=4096),
        attention_bias(absent=False, mlp=False),
        *FACTORS,
        softcap("attn_logit_softcapping", 50.0),
        softcap("final_logit_softcapping", 30.0),
    ),
    neutral={"use_bidirectional_attention": (False,)},
    without_effect=UNREAD | {"sliding_window_size"},  # a copy of sliding_window in published files
    exported_constants={"attention_dropout": 0.0},
    ignored=llama.FAMILY.ignored,
    prefix="model.",
)
