"""Damaged configurations, ours and those of Hugging Face, are accepted or refused in one line."""

import json

import pytest
from fuzzing import fuzz, mutate_json
from megatron_models.errors import ConfigError
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.families import gpt2, llama, mixtral
from megatron_models.parameters import parameter_shapes

COMMON = {"vocab_size": 61, "tie_word_embeddings": False}
GPT2 = {**COMMON, "n_layer": 3, "n_embd": 24, "n_head": 4, "n_inner": 40, "n_positions": 16}
SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
LLAMA = {
    **COMMON,
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **SCALING},
    "layer_types": ["full_attention"] * 3,
}
MIXTRAL = {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}


def test_model_records(fuzz_count):
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "vocab_size": 61}
    plain = GPTConfig(num_layers=2, max_position_embeddings=16, **sizes)
    experts = {"num_experts": 4, "moe_layer_freq": "[0]*2+[1]*2"}
    sparse = GPTConfig(num_layers=4, max_position_embeddings=16, **sizes, **experts)

    def read(content: bytes) -> None:
        config = GPTConfig.from_json(content.decode(errors="replace"))
        if config.num_layers < 1000:
            parameter_shapes(config)

    latent = {"multi_latent_attention": True, "position_embedding_type": "rope", "use_mup": True}
    latent |= {"rope_scaling_type": "yarn", "rope_scaling_original_length": 8}
    wide = GPTConfig(num_layers=2, max_position_embeddings=16, **sizes, **latent)
    seeds = [config.to_json().encode() for config in (plain, sparse, wide)]
    fuzz(read, seeds, ConfigError, count=fuzz_count, mutate=mutate_json)


@pytest.mark.parametrize(
    ("family", "seed"),
    [(gpt2, GPT2), (llama, LLAMA), (mixtral, MIXTRAL)],
    ids=["gpt2", "llama", "mixtral"],
)
def test_hugging_face_configurations(family, seed, fuzz_count):
    def read(content: bytes) -> None:
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            raise ConfigError("no JSON, which a reader of the file says") from None
        if not isinstance(values, dict):
            raise ConfigError("no object, which a reader of the file says")
        config = family.FAMILY.config_from_hf(values)
        family.FAMILY.config_to_hf(config)

    seeds = [json.dumps(seed).encode()]
    fuzz(read, seeds, ConfigError, count=fuzz_count, mutate=mutate_json)


def test_a_name_of_any_length_is_shortened():
    values = {**LLAMA, "rope_parameters": {**LLAMA["rope_parameters"], "x" * 9999: 1}}
    with pytest.raises(ConfigError, match=r"^rotary settings with 'xxx.{,40}xxx' = 1 are not"):
        llama.FAMILY.config_from_hf(values)
