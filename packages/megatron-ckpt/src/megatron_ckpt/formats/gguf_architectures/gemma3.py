"""GGUF files of the architecture ``gemma3``: the text models of Gemma 3.

llama.cpp stores 1 + the gain of each norm; Hugging Face stores the gain. The files leave out what
is the same in all published models: the base of layers with a window and their pattern. llama.cpp
computes these values, and so does this module.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ckpt.formats.gguf_architectures.architecture import Architecture
from megatron_ckpt.formats.gguf_architectures.settings import Settings
from megatron_ckpt.formats.gguf_file import GGUFFile

if TYPE_CHECKING:
    from megatron_ckpt.ops.rows import RowData

_BLOCK, _THEIRS = "model.layers.{i}", "blk.{i}"
_GAIN = ("add_constant", {"value": -1.0})
_NORMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Metadata of this architecture only.
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_LOCAL_BASE, _SOFTCAP = "rope.freq_base_swa", "final_logit_softcapping"
#: The 27B model divides scores by the square root of hidden_size / heads, not of its channels.
_LAYERS_OF_27B = 62


def _rows(config: Mapping[str, Any]) -> "list[RowData]":
    """Returns the rows from GGUF names to Hugging Face names."""
    rows: list[RowData] = [
        ("model.embed_tokens.weight", ["token_embd.weight"], []),
        ("model.norm.weight", ["output_norm.weight"], [_GAIN]),
    ]
    for theirs, name in _NORMS.items():
        rows.append((f"{_BLOCK}.{theirs}.weight", [f"{_THEIRS}.{name}.weight"], [_GAIN]))
    for theirs, name in _MATRICES.items():
        rows.append((f"{_BLOCK}.{theirs}.weight", [f"{_THEIRS}.{name}.weight"], []))
    if not config["tie_word_embeddings"]:
        rows.append(("lm_head.weight", ["output.weight"], []))
    return rows


def _config(file: GGUFFile) -> dict[str, Any]:
    """Returns the content of ``config.json``; refuses settings that would change the model."""
    settings = Settings(file, "gemma3.")
    settings.refuse_unknown({_WINDOW, _PATTERN, _LOCAL_BASE, _SOFTCAP})
    shape = settings.shape()
    layers, pattern = shape["num_hidden_layers"], settings.number(_PATTERN, 6)
    scalar = shape["head_dim"]
    if layers == _LAYERS_OF_27B:
        scalar = shape["hidden_size"] // shape["num_attention_heads"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **shape,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": settings.number(_SOFTCAP, 0.0) or None,
        "sliding_window": settings.number(_WINDOW),
        "sliding_window_pattern": pattern,
        "rope_theta": settings.number("rope.freq_base", 1e6),
        "rope_local_base_freq": settings.number(_LOCAL_BASE, 1e4),
        **settings.rope_scaling(),
        **settings.tokens(),
    }


GEMMA3 = Architecture(rows=_rows, config=_config)
