"""Granite: Llama with factors of embeddings, sublayers, attention scores and logits.

IBM, 2024. The factors are those of maximal update parametrization. ``attention_multiplier`` takes
the place of 1 / sqrt(head dimension).
"""

import dataclasses
import math

from megatron_models.families.settings import Custom, HFConfig, Mapped, unsupported_hf_field
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama


def _scale_from_hf(title: str, hf_config: HFConfig) -> dict[str, float]:
    found = hf_config.get("attention_multiplier", 1.0)
    # 0 would stand for 1 / sqrt(head dimension) here.
    if type(found) not in (int, float) or not 0 < found < math.inf:
        raise unsupported_hf_field(title, "attention_multiplier", found, ["a number above 0"])
    return {"softmax_scale": float(found)}


def _scale_to_hf(config: GPTConfig) -> dict[str, float]:
    return {"attention_multiplier": config.softmax_scale or config.kv_channels**-0.5}


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="granite",
    title="Granite",
    architectures=("GraniteForCausalLM",),
    model_type="granite",
    settings={
        **llama.FAMILY.settings,
        **{
            name: Mapped(name, absent=1.0)
            for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        },
    },
    custom=(
        *llama.FAMILY.custom,
        Custom(("softmax_scale",), ("attention_multiplier",), _scale_from_hf, _scale_to_hf),
    ),
    neutral={},
    without_effect=frozenset(),
    defers_to=("llama",),
)
