"""GGUF files of the architecture ``llama``: Llama, SmolLM and others of this shape.

llama.cpp rotates neighbouring channels of queries and keys, so their rows are stored in that order;
`rope_permute` reorders them. The rotary scaling of Llama 3.1 is not in the metadata but in a tensor
of factors, from which the settings are recovered.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.gguf_architectures.architecture import Architecture
from megatron_ckpt.formats.gguf_architectures.settings import Settings
from megatron_ckpt.formats.gguf_file import GGUFFile

if TYPE_CHECKING:
    from megatron_ckpt.ops.rows import RowData

_FACTORS = "rope_freqs.weight"
_BLOCK, _THEIRS = "model.layers.{i}", "blk.{i}"

#: Rotary scaling of Llama 3.1, 3.2 and 3.3, which differ only in the factor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rows(config: Mapping[str, Any]) -> "list[RowData]":
    """Returns the rows from GGUF names to Hugging Face names."""
    attention, mlp = f"{_BLOCK}.self_attn", f"{_BLOCK}.mlp"
    rows: list[RowData] = [
        ("model.embed_tokens.weight", ["token_embd.weight"], []),
        (f"{_BLOCK}.input_layernorm.weight", [f"{_THEIRS}.attn_norm.weight"], []),
        (f"{_BLOCK}.post_attention_layernorm.weight", [f"{_THEIRS}.ffn_norm.weight"], []),
        ("model.norm.weight", ["output_norm.weight"], []),
    ]
    if not config["tie_word_embeddings"]:
        rows.append(("lm_head.weight", ["output.weight"], []))
    for part in ("weight", "bias") if config["attention_bias"] else ("weight",):
        for letter, heads in (("q", "$num_attention_heads"), ("k", "$num_key_value_heads")):
            permute = ("rope_permute", {"heads": heads, "head_dim": "$head_dim"})
            names = [f"{_THEIRS}.attn_{letter}.{part}"]
            rows.append((f"{attention}.{letter}_proj.{part}", names, [permute]))
        rows.append((f"{attention}.v_proj.{part}", [f"{_THEIRS}.attn_v.{part}"], []))
        rows.append((f"{attention}.o_proj.{part}", [f"{_THEIRS}.attn_output.{part}"], []))
    for part in ("weight", "bias") if config["mlp_bias"] else ("weight",):
        for name in ("gate", "up", "down"):
            rows.append((f"{mlp}.{name}_proj.{part}", [f"{_THEIRS}.ffn_{name}.{part}"], []))
    return rows


def _config(file: GGUFFile) -> dict[str, Any]:
    """Returns the content of ``config.json``; refuses settings that would change the model."""
    settings = Settings(file, "llama.")
    settings.refuse_unknown()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **settings.shape(),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensor_names,
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        **settings.tokens(),
    }
    if _FACTORS in file.tensor_names:
        return config | {"rope_scaling": _llama3_scaling(file, config)}
    return config | settings.rope_scaling()


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    factors = file.read(_FACTORS).double().tolist()
    factor = round(max(factors), 4)
    original, low = _LLAMA3["original_max_position_embeddings"], _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]

    def expected(pair: int) -> float:
        turns = original / (2 * math.pi * config["rope_theta"] ** (2 * pair / config["head_dim"]))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        return float(1.0 / ((1.0 - smooth) / factor + smooth))

    wanted = [expected(pair) for pair in range(config["head_dim"] // 2)]
    close = len(wanted) == len(factors) and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, wanted, strict=True)
    )
    if not close:
        raise CheckpointError(
            f"{file.path}: the rotary factors in {_FACTORS!r} are not those of Llama 3.1; import "
            "the safetensors of the model"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


LLAMA = Architecture(rows=_rows, config=_config, ignored=(_FACTORS,))
