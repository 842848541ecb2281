"""Settings of a ``config.json`` without effect on what a model computes.

Forks and successors of a published model keep the name of its architecture and add fields, which
weights alone do not show. A field is therefore refused unless it is known to have no effect, here
or in the family: with any value (`WITHOUT_EFFECT`) or with the listed values (`NEUTRAL`).
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from megatron_models.errors import ConfigError
from megatron_models.families.settings import HFConfig

_OFF = (None, False)
_ONE = (None, 1, 1.0)
_NONE = (None,)
_ZERO = (None, 0)

#: Fields that never affect the model: files and versions, token ids, returned values, generation
#: (now in ``generation_config.json``), labels of classifiers, training.
WITHOUT_EFFECT = frozenset(
    {
        "architectures",  # used before, to select the family
        "_name_or_path",
        "transformers_version",
        "transformers.js_config",
        "dtype",
        "torch_dtype",
        "use_bfloat16",
        "torchscript",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "tokenizer_class",
        "prefix",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "use_cache",
        "return_dict",
        "return_dict_in_generate",
        "output_hidden_states",
        "output_attentions",
        "output_scores",
        "is_decoder",
        "output_past",
        "n_special",
        "predict_special_tokens",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "diversity_penalty",
        "exponential_decay_length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "remove_invalid_values",
        "task_specific_params",
        "problem_type",
        "finetuning_task",
        "num_labels",
        "id2label",
        "label2id",
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
    }
)

#: For all families: field -> values with which it has no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # Weights in another format.
    "quantization_config": _NONE,
    "compression_config": _NONE,
    # Code that is distributed with the weights and replaces the architecture's.
    "auto_map": _NONE,
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
    "tie_encoder_decoder": _OFF,
    "cross_attention_hidden_size": _NONE,
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
    "use_mrope": _OFF,
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

#: Fields that limit the attention span -> the name of such layers in ``layer_types``.
WINDOWS: Mapping[str, str] = {
    "sliding_window": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
}

#: Fields that `refuse_windows` checks. The last is the first layer with a window.
WINDOW_FIELDS = frozenset({*WINDOWS, "use_sliding_window", "layer_types", "max_window_layers"})


def refuse_windows(title: str, hf_config: HFConfig) -> None:
    """Refuses windows that hide any of the positions, in all layers or in some.

    A family that maps a field does not pass it. A window as long as the number of positions hides
    nothing, since no sequence is longer.
    """
    key = "n_positions" if "n_positions" in hf_config else "max_position_embeddings"
    positions, whole = hf_config.get(key), ["full_attention"]
    for name, kind in WINDOWS.items():
        window = hf_config.get(name)
        if window is None:
            continue
        if type(window) is not int or type(positions) is not int or window < positions:
            raise ConfigError(
                f"{title} models with {name} = {reprlib.repr(window)} are not supported, only "
                f"None or at least {key} = {reprlib.repr(positions)}"
            )
        whole.append(kind)
    in_use = hf_config.get("use_sliding_window")
    if in_use and "sliding_attention" not in whole:
        raise ConfigError(
            f"{title} models with use_sliding_window = {reprlib.repr(in_use)} and no "
            "sliding_window are not supported"
        )
    kinds = hf_config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind not in whole for kind in kinds)
    ):
        raise ConfigError(
            f"{title} models with layer_types = {reprlib.repr(kinds)} are not supported, only "
            f"{' or '.join(map(repr, whole))} in every layer"
        )
