"""GPT-2: learned positions, LayerNorm, tanh GELU, biases, tied output (Radford et al., 2019).

Linear layers are stored transposed there ("Conv1D"), and one matrix holds the queries, then the
keys, then the values of all heads.
"""

from collections.abc import Mapping
from typing import Any

from megatron_models.config import GPTConfig
from megatron_models.errors import ConfigError
from megatron_models.families.family import Family, Operation, Row, need, refuse_unless, require

_TRANSPOSE: Operation = ("transpose", {})
_QKV: Operation = (
    "interleave_qkv",
    {"heads": "$num_attention_heads", "groups": "$num_query_groups", "head_dim": "$kv_channels"},
)
_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})


def _same(ours: str, theirs: str) -> tuple[Row, ...]:
    return tuple((f"{ours}.{part}", (f"{theirs}.{part}",), ()) for part in ("weight", "bias"))


def _linear(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.weight", (f"{theirs}.weight",), (_TRANSPOSE,)),
        (f"{ours}.bias", (f"{theirs}.bias",), ()),
    )


_BLOCK = "transformer.h.{i}"
_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("transformer.wte.weight",), (_VOCAB,)),
    ("embedding.position.weight", ("transformer.wpe.weight",), ()),
    *_same("layers.{i}.attention_norm", f"{_BLOCK}.ln_1"),
    ("layers.{i}.attention.qkv.weight", (f"{_BLOCK}.attn.c_attn.weight",), (_TRANSPOSE, _QKV)),
    ("layers.{i}.attention.qkv.bias", (f"{_BLOCK}.attn.c_attn.bias",), (_QKV,)),
    *_linear("layers.{i}.attention.out", f"{_BLOCK}.attn.c_proj"),
    *_same("layers.{i}.mlp_norm", f"{_BLOCK}.ln_2"),
    *_linear("layers.{i}.mlp.up", f"{_BLOCK}.mlp.c_fc"),
    *_linear("layers.{i}.mlp.down", f"{_BLOCK}.mlp.c_proj"),
    *_same("final_norm", "transformer.ln_f"),
    ("output.weight", ("lm_head.weight",), (_VOCAB,)),
)

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "activation_function": (*_TANH, "gelu"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "position_embedding_type": (None, "absolute"),
    "rope_theta": (None,),
    "rope_scaling": (None, {}),
    "rope_parameters": (None, {}),
    "multi_query": (None, False),
}


def config_from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """Read the content of a GPT-2 ``config.json``. Dropout rates are not part of the model here."""
    refuse_unless(values, _ALLOWED, "GPT-2")
    return GPTConfig(
        num_layers=need(values, "n_layer", "GPT-2"),
        hidden_size=need(values, "n_embd", "GPT-2"),
        num_attention_heads=need(values, "n_head", "GPT-2"),
        vocab_size=need(values, "vocab_size", "GPT-2"),
        max_position_embeddings=need(values, "n_positions", "GPT-2"),
        ffn_hidden_size=values.get("n_inner") or 0,
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
        activation="gelu" if values.get("activation_function") == "gelu" else "gelu_tanh",
        untie_embeddings_and_output_weights=not values.get("tie_word_embeddings", True),
        init_method_std=values.get("initializer_range", 0.02),
    )


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Make the content of a GPT-2 ``config.json``."""
    wanted = {
        "num_experts": 0,
        "softmax_type": "vanilla",
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "num_query_groups": config.num_attention_heads,
        "query_size": config.hidden_size,
    }
    require(config, wanted, "GPT-2")
    if config.gated:
        raise ConfigError("a GPT-2 model has a GELU, this one swiglu; it cannot be exported to it")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_positions": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


FAMILY = Family(
    name="gpt2",
    version=1,
    architectures=("GPT2LMHeadModel",),
    rows=_ROWS,
    config_to_hf=config_to_hf,
    config_from_hf=config_from_hf,
    conditions={"output.weight": "untie_embeddings_and_output_weights"},
    ignored=(
        ("lm_head.weight", "same_as", {"other": "transformer.wte.weight", "rows": "$vocab_size"}),
        (f"{_BLOCK}.attn.bias", "causal_mask", {}),
        # It is -1e4, which bfloat16 rounds to -9984.
        (f"{_BLOCK}.attn.masked_bias", "at_most", {"value": -9e3}),
    ),
    prefix="transformer.",
)
