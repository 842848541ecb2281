"""Fields of a ``config.json`` that change what a model computes, and values that change nothing.

Forks and successors of a published model keep its architecture's name and add such fields. Weights
alone do not show them, so a value that is not listed is refused.
"""

from collections.abc import Mapping
from typing import Any

_OFF = (None, False)
_ONE = (None, 1, 1.0)
_NONE = (None,)
_ZERO = (None, 0)

#: For every family: field -> values with which it has no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Weights are stored in another form.
    "quantization_config": _NONE,
    "compression_config": _NONE,
    "pruned_heads": (None, {}, []),
    # Factors on embeddings, residuals, attention scores and logits.
    "embedding_multiplier": _ONE,
    "residual_multiplier": _ONE,
    "attention_multiplier": _NONE,
    "logits_scaling": _ONE,
    "logit_scale": _ONE,
    "lm_head_multiplier": _ONE,
    "scale_emb": _ONE,
    "scale_depth": _NONE,
    "dim_model_base": _NONE,
    "mup_width_multiplier": _ONE,
    "query_pre_attn_scalar": _NONE,
    "attn_scale": _NONE,
    "scale_embeddings": _OFF,
    "normalize_embedding": _OFF,
    # Bounds on scores and logits.
    "attn_logit_softcapping": _NONE,
    "final_logit_softcapping": _NONE,
    "attn_temperature_tuning": _OFF,
    "clip_qkv": _NONE,
    # Other attention.
    "is_causal": (None, True),
    "add_cross_attention": _OFF,
    "is_encoder_decoder": _OFF,
    "alibi": _OFF,
    "use_qk_norm": _OFF,
    "qk_norm": _OFF,
    "qk_layernorm": _OFF,
    "kv_lora_rank": _NONE,
    # Other rotary positions.
    "partial_rotary_factor": _ONE,
    "rotary_pct": _ONE,
    "rope_interleave": _OFF,
    "rope_interleaved": _OFF,
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": _NONE,
    "rope_local_base_freq": _NONE,
    # Other blocks.
    "parallel_attn": _OFF,
    "use_parallel_residual": _OFF,
    "parallel_residual": _OFF,
    "apply_residual_connection_post_layernorm": _OFF,
    "cross_layer_attention": _OFF,
    "num_nextn_predict_layers": _ZERO,
    "num_kv_shared_layers": _ZERO,
    "head_bias": _OFF,
    "qkv_bias": _OFF,
    "use_bias": _OFF,
}

#: Fields that limit how far a token sees -> the name that ``layer_types`` has for such layers.
WINDOWS: Mapping[str, str] = {
    "sliding_window": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
}
