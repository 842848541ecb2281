"""The fields of ``generation_config.json`` and what becomes of each.

The names and the values without effect are those of `GenerationConfig` in transformers 5.23. A test
compares them with it, so that each of its fields is in one of the tables.
"""

from collections.abc import Mapping
from typing import Any

#: Parts of a ``config.json`` in which transformers looks for fields of generation.
NESTED = ("decoder", "generator", "text_config")

#: Fields that `GenerationDefaults` applies.
APPLIED = frozenset(
    {
        "eos_token_id",
        "decoder_start_token_id",
        "bos_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "max_new_tokens",
    }
)

#: Fields that transformers reads only if ``do_sample`` is true -> values without effect.
SAMPLING_ONLY: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_k": (50,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}

#: Other fields that change which tokens are chosen or when a text ends -> values without effect.
ANY_STRATEGY: Mapping[str, tuple[Any, ...]] = {
    "max_length": (20,),  # the default of transformers, which older versions wrote into files
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "stop_strings": ([],),
    "early_stopping": (False,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": ([],),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": ({},),
}

#: Fields that do not change the text: caches, memory, speed, what a call returns, versions, padding
#: of a batch.
WITHOUT_EFFECT = frozenset(
    {
        "pad_token_id",
        "renormalize_logits",  # probabilities of tokens do not change
        "remove_invalid_values",  # NaN in logits is an error here
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "low_memory",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "assistant_ensemble_weight",
        "target_lookbehind",
        "speculation_type",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "_from_model_config",
        "transformers_version",
    }
)
