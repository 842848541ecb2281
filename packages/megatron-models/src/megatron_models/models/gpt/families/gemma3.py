"""Gemma 3, text: Gemma 2 with norms of queries and keys instead of bounded scores.

Gemma Team, 2025. Five of six layers have a window and rotate with another base.
"""

import dataclasses

from megatron_models.families.settings import Constant, Mapped
from megatron_models.models.gpt.families import gemma2, llama
from megatron_models.models.gpt.families.biases import attention_bias
from megatron_models.models.gpt.families.local_rope import local_rope
from megatron_models.models.gpt.families.qwen3 import ATTENTION_ROWS
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows

_WINDOWS = windows(
    except_every(6, "sliding_window_pattern"), absent=4096, reads=("sliding_window_pattern",)
)

FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    name="gemma3",
    title="Gemma 3",
    architectures=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    rows=(*gemma2.START_ROWS, *ATTENTION_ROWS, *llama.DENSE_ROWS, *llama.HEAD_ROWS),
    settings={
        **gemma2.SETTINGS,
        "vocab_size": Mapped("vocab_size", absent=262208),
        "max_position_embeddings": Mapped("max_position_embeddings", absent=131072),
        "qk_layernorm": Constant(True),
    },
    custom=(
        _WINDOWS,
        local_rope(rope(1e6), base=1e4, name="rope_local_base_freq"),
        attention_bias(absent=False, mlp=False),
        *gemma2.FACTORS,
        gemma2.softcap("final_logit_softcapping", None),
    ),
    # A note of the pattern that layer_types lists.
    without_effect=gemma2.UNREAD | {"_sliding_window_pattern"},
    ignored=llama.FAMILY.ignored[:1],
)
