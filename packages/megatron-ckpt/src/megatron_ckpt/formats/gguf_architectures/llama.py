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
from megatron_ckpt.formats.gguf_file import GGUFFile

if TYPE_CHECKING:
    from megatron_ckpt.ops.rows import RowData

_PREFIX = "llama."
_FACTORS = "rope_freqs.weight"
_BLOCK, _THEIRS = "model.layers.{i}", "blk.{i}"

#: Metadata -> ``config.json``.
_NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
#: Metadata that is read elsewhere or does not affect the computation of the model.
_OTHERS = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "tensor_data_layout",
}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
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
    _refuse_unknown(file)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    for ours, theirs in _NUMBERS.items():
        config[theirs] = _number(file, ours)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = _number(file, "attention.head_count_kv", heads)
    head_dim = _number(file, "attention.key_length", config["hidden_size"] // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if _number(file, key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {_PREFIX}{key} is {_number(file, key)}, but heads have {head_dim} "
                "channels; it must be equal"
            )
    names = file.tensor_names
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{file.path} has no tensor 'token_embd.weight': it is not a model")
    config |= {
        "head_dim": head_dim,
        "vocab_size": _number(file, "vocab_size", file.meta("token_embd.weight").shape[0]),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
    }
    if scaling := _scaling(file, config):
        config["rope_scaling"] = scaling
    for ours, theirs in _TOKENS.items():
        if (token := file.get(f"tokenizer.ggml.{theirs}")) is not None:
            config[ours] = token
    return config


def _refuse_unknown(file: GGUFFile) -> None:
    for key in file.keys():  # noqa: SIM118 - the file is not a mapping
        setting = key.removeprefix(_PREFIX)
        if setting == key or setting in _NUMBERS or setting in _OTHERS:
            continue
        value = file.get(key)
        if value:  # dense models have expert_count and similar keys with the value 0
            raise CheckpointError(
                f"{file.path}: {key} is {value!r}, which is not supported for GGUF files; import "
                "the safetensors of the model"
            )


def _number(file: GGUFFile, key: str, default: Any = None) -> Any:
    value = file.get(_PREFIX + key, default) if default is not None else file.require(_PREFIX + key)
    if isinstance(value, float):
        import numpy as np

        return float(str(np.float32(value)))  # stored as float32: 1e-05, not 9.99999974e-06
    if not isinstance(value, int):
        raise CheckpointError(f"{file.path}: {_PREFIX}{key} is {value!r}, not a number")
    return value


def _scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns ``rope_scaling`` from the metadata or from the tensor of factors."""
    kind = file.get(f"{_PREFIX}rope.scaling.type", "none")
    if _FACTORS in file.tensor_names:
        return _llama3_scaling(file, config)
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": _number(file, "rope.scaling.factor")}


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
