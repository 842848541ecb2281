"""Mamba-2 (Dao and Gu, 2024), in the format of transformers.

Such a model has no positions, so a ``config.json`` has no number of them.
"""

from collections.abc import Mapping
from typing import Any

from megatron_models.components.mamba.config import MambaConfig
from megatron_models.families.family import UNTIED, Family, Operation, Row
from megatron_models.families.settings import (
    Constant,
    Custom,
    HFConfig,
    Mapped,
    Translated,
    unsupported_field,
    unsupported_hf_field,
)
from megatron_models.models.mamba.families.rows import limits_from_hf, limits_to_hf, mamba_rows

POSITIONS = 2**20
"""Number of positions of a model without positions: more than any sequence has."""

_VOCAB: Operation = ("slice_rows", {"rows": "$vocab_size"})
_BLOCK = "backbone.layers.{i}"
_ROWS: tuple[Row, ...] = (
    ("embedding.word.weight", ("backbone.embeddings.weight",), (_VOCAB,)),
    ("layers.{i}.mamba_norm.weight", (f"{_BLOCK}.norm.weight",), ()),
    *mamba_rows(
        f"{_BLOCK}.mixer",
        where={},
        conv_bias={"if": "$mamba_conv_bias"},
        proj_bias={"if": "$mamba_proj_bias"},
    ),
    ("final_norm.weight", ("backbone.norm_f.weight",), ()),
    ("output.weight", ("lm_head.weight",), (_VOCAB,), UNTIED),
)


def _widths_from_hf(title: str, hf_config: HFConfig) -> Mapping[str, Any]:
    heads, head = hf_config.get("num_heads", 128), hf_config.get("head_dim", 64)
    expand, hidden = hf_config.get("expand", 2), hf_config.get("hidden_size", 4096)
    sound = all(type(each) is int for each in (heads, head, expand, hidden))
    if sound and heads * head != expand * hidden:
        known = [f"expand * hidden_size = {expand * hidden}"]
        raise unsupported_hf_field(title, "num_heads * head_dim", heads * head, known)
    return {"mamba_num_heads": heads, "mamba_head_dim": head}


def _widths_to_hf(config: MambaConfig) -> Mapping[str, Any]:
    if config.mamba_inner_size % config.hidden_size:
        raise unsupported_field(
            "mamba_num_heads * mamba_head_dim",
            f"a multiple of {config.hidden_size}",
            config.mamba_inner_size,
        )
    return {
        "num_heads": config.mamba_num_heads,
        "head_dim": config.mamba_head_dim,
        "expand": config.mamba_inner_size // config.hidden_size,
    }


FAMILY = Family(
    name="mamba2",
    kind="mamba",
    title="Mamba-2",
    architectures=("Mamba2ForCausalLM",),
    model_type="mamba2",
    rows=_ROWS,
    settings={
        "num_layers": Mapped("num_hidden_layers", absent=64),
        "hidden_size": Mapped("hidden_size", absent=4096),
        "vocab_size": Mapped("vocab_size", absent=32768),
        "mamba_state_dim": Mapped("state_size", absent=128),
        "mamba_num_groups": Mapped("n_groups", absent=8),
        "mamba_conv_kernel": Mapped("conv_kernel", absent=4),
        "mamba_conv_bias": Mapped("use_conv_bias", absent=True),
        "mamba_proj_bias": Mapped("use_bias", absent=False),
        "normalization": Constant("RMSNorm"),
        "norm_epsilon": Mapped("layer_norm_epsilon", absent=1e-5),
        "untie_embeddings_and_output_weights": Translated(
            "tie_word_embeddings", ((True, False), (False, True), (None, True)), absent=False
        ),
        "init_method_std": Mapped("initializer_range", absent=0.1),
    },
    custom=(
        Custom(
            ("mamba_num_heads", "mamba_head_dim"),
            ("num_heads", "head_dim", "expand"),
            _widths_from_hf,
            _widths_to_hf,
        ),
        Custom(
            ("mamba_dt_min", "mamba_dt_max"), ("time_step_limit",), limits_from_hf, limits_to_hf
        ),
        Custom(
            ("max_position_embeddings", "add_bias_linear"),
            (),
            lambda title, hf_config: {"max_position_embeddings": POSITIONS},
            lambda config: {},
        ),
    ),
    neutral={"hidden_act": ("silu", "swish"), "rms_norm": (True,)},
    # Chunks of the scan, precision of the residual stream, initial values, and fields of Codestral
    # that transformers does not read.
    without_effect=frozenset(
        {
            *("chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank"),
            *("time_step_min", "time_step_max", "time_step_floor", "time_step_init_scheme"),
            *("time_step_scale", "intermediate_size", "norm_before_gate"),
        }
    ),
    ignored=(
        (
            "lm_head.weight",
            "same_as",
            {"other": "backbone.embeddings.weight", "rows": "$vocab_size"},
        ),
    ),
    prefix="backbone.",
)
