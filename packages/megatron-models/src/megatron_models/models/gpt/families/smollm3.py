"""SmolLM3: Llama with layers that have no rotary positions (Yang et al., 2025).

Files list the layers with rotary positions as 1 in ``no_rope_layers``, which is the opposite of its
name and of Megatron-LM's pattern. A window, if any, is that of the layers without positions.
"""

import dataclasses
import reprlib
from collections.abc import Sequence

from megatron_models.errors import ConfigError
from megatron_models.families.settings import Custom, HFConfig, Mapped, Translated
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import llama
from megatron_models.models.gpt.families.rope import rope
from megatron_models.models.gpt.families.windows import except_every, windows

_INTERVAL = 4
"""Every so many layers, one has no rotary positions in a file that lists none."""


def _rotated_from_hf(title: str, hf_config: HFConfig) -> dict[str, str]:
    layers = hf_config.get("num_hidden_layers")
    rotated = hf_config.get("no_rope_layers")
    if rotated is None:
        interval = hf_config.get("no_rope_layer_interval", _INTERVAL)
        if type(interval) is not int or interval < 1:
            raise ConfigError(
                f"{title} models with no_rope_layer_interval = {reprlib.repr(interval)} are not "
                "supported; give a number of at least 1"
            )
        return {"no_rope_freq": str(interval)}
    if (
        type(layers) is not int
        or not isinstance(rotated, list)
        or len(rotated) < layers
        or any(type(each) is not int or each not in (0, 1) for each in rotated)
    ):
        raise ConfigError(
            f"{title} models with no_rope_layers = {reprlib.repr(rotated)} are not supported; give "
            "a 0 or 1 for each layer"
        )
    return {"no_rope_freq": _pattern([1 - each for each in rotated[:layers]])}


def _pattern(unrotated: list[int]) -> str:
    """Returns the shortest pattern of layers without rotary positions."""
    if not any(unrotated):
        return "0"
    every = unrotated.index(1) + 1
    if unrotated == [int(number % every == 0) for number in range(1, len(unrotated) + 1)]:
        return str(every)
    return str(unrotated)


def _rotated_to_hf(config: GPTConfig) -> dict[str, list[int]]:
    return {"no_rope_layers": [int(not each) for each in config.unrotated_layers]}


NO_ROPE = Custom(
    fields=("no_rope_freq",),
    hf_fields=("no_rope_layers", "no_rope_layer_interval"),
    read=_rotated_from_hf,
    write=_rotated_to_hf,
)


def _without_positions(hf_config: HFConfig, count: int) -> Sequence[bool]:
    """Returns which layers have no rotary positions; `NO_ROPE` has checked the fields."""
    rotated = hf_config.get("no_rope_layers")
    if rotated is None:
        rotated = except_every(_INTERVAL, "no_rope_layer_interval")(hf_config, count)
    return [not each for each in rotated[:count]]


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="smollm3",
    title="SmolLM3",
    architectures=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    settings={
        **llama.FAMILY.settings,
        "num_query_groups": Mapped("num_key_value_heads", absent=4, null=0),
        "untie_embeddings_and_output_weights": Translated(
            "tie_word_embeddings", ((True, False), (False, True), (None, True)), absent=True
        ),
    },
    custom=(
        rope(2e6),
        llama.BIASES,
        NO_ROPE,
        windows(
            _without_positions, switch=False, reads=("no_rope_layers", "no_rope_layer_interval")
        ),
    ),
    neutral={},
    without_effect=frozenset({"pretraining_tp"}),
)
