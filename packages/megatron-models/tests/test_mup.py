"""Fields, initial weights and width ratios of maximal update parametrization."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from megatron_models import GPT, ConfigError, GPTConfig
from megatron_models.models.gpt.families import granite, llama
from megatron_parallel import Mesh

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "add_bias_linear": False,
}


def test_scores_and_logits_have_the_factors_of_megatron_lm() -> None:
    config = GPTConfig(**SIZES, **MUP)
    assert config.softmax_scale == 1 / 16
    assert config.logits_scaling == 4.0
    based = GPTConfig(**SIZES, **MUP, mup_base_head_dim=4.0)
    assert based.softmax_scale == math.sqrt(4.0) / 16
    half = GPTConfig(**SIZES, **MUP, mup_attn_scale_power=0.5)
    assert half.softmax_scale == 1 / math.sqrt(16)
    given = GPTConfig(**SIZES, **MUP, softmax_scale=0.3, logits_scaling=2.0)
    assert (given.softmax_scale, given.logits_scaling) == (0.3, 2.0)
    alone = GPTConfig(**SIZES, use_mup=True)
    assert (alone.mup_base_hidden_size, alone.logits_scaling) == (64, 1.0)
    assert alone.width_ratios() == {}


def test_a_configuration_survives_its_record() -> None:
    config = GPTConfig(**SIZES, **MUP, mup_base_head_dim=4.0)
    assert GPTConfig.from_json(config.to_json()) == config


def test_latent_attention_keeps_the_factor_of_yarn() -> None:
    latent = {**SIZES, **LLAMA, "multi_latent_attention": True, "rope_scaling_type": "yarn"}
    latent |= {"rope_scaling_factor": 8.0, "rope_scaling_original_length": 8}
    latent |= {"mscale_all_dim": 1.0}
    plain = GPTConfig(**latent)
    config = GPTConfig(**latent, **MUP)
    assert plain.latent_softmax_scale != 1 / math.sqrt(plain.kv_channels)
    ratio = config.latent_softmax_scale / plain.latent_softmax_scale
    assert ratio == pytest.approx(1 / math.sqrt(plain.kv_channels), rel=1e-14)


MODELS = {
    "gpt": {},
    "untied": {**LLAMA, "untie_embeddings_and_output_weights": True},
    "experts": {
        "num_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
        "softmax_type": "learnable",
        "mtp_num_layers": 1,
    },
    "latent": {**LLAMA, "multi_latent_attention": True, "q_lora_rank": 8},
    "linear": {
        "heterogeneous_layers_config_encoded_json": (
            '[{"attention": {"replace_with_linear": true}}, {"mlp": {"replace_with_linear": true}}]'
        )
    },
}


def is_matrix(name: str) -> bool:
    """Whether a parameter is matrix-like in Yang et al. 2022, table 8, by its name."""
    return name.endswith(".weight") and not any(
        word in name for word in ("norm", "sinks", "embedding.", "output.")
    )


@pytest.mark.parametrize("kind", MODELS)
def test_inputs_of_matrices_grow_and_no_others(kind: str) -> None:
    config = GPTConfig(**SIZES, **MODELS[kind], **MUP)
    ratios = config.width_ratios()
    assert ratios == {name: (4.0 if is_matrix(name) else 1.0, 4.0) for name in config.parameters()}
    assert sum(found == (4.0, 4.0) for found in ratios.values()) >= 2 * config.num_layers


@pytest.mark.parametrize("kind", MODELS)
def test_initial_weights_of_matrices_shrink_by_the_root_of_the_ratio(kind: str) -> None:
    plain = GPT(GPTConfig(**SIZES, **MODELS[kind]), Mesh.single())
    model = GPT(GPTConfig(**SIZES, **MODELS[kind], **MUP), Mesh.single())
    usual = dict(plain.named_parameters())
    for name, weight in model.named_parameters():
        # Sinks are drawn like the matrices beside them, as in Megatron-LM.
        expected = usual[name] / (2.0 if is_matrix(name) or "sinks" in name else 1.0)
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0, msg=name)
    assert model.config.init_method_std == plain.config.init_method_std


def test_logits_are_those_of_the_factors_without_mup() -> None:
    config = GPTConfig(**SIZES, **MUP)
    factors = {"softmax_scale": config.softmax_scale, "logits_scaling": config.logits_scaling}
    plain = GPT(GPTConfig(**SIZES, **factors), Mesh.single(), seed=1)
    model = GPT(config, Mesh.single(), seed=2)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens), plain(tokens))


def test_a_family_exports_the_factors_or_refuses_them() -> None:
    config = GPTConfig(**SIZES, **LLAMA, **MUP)
    found = granite.FAMILY.config_to_hf(config)
    assert (found["attention_multiplier"], found["logits_scaling"]) == (1 / 16, 4.0)
    with pytest.raises(ConfigError, match=r"logits_scaling = 1\.0, this one has 4\.0"):
        llama.FAMILY.config_to_hf(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mup_base_hidden_size": 16}, "mup_base_hidden_size 16 has no effect without use_mup"),
        ({"mup_base_head_dim": 4.0}, "mup_base_head_dim 4.0 has no effect without use_mup"),
        ({"mup_attn_scale_power": 0.5}, "mup_attn_scale_power 0.5 has no effect without use_mup"),
        ({**MUP, "mup_base_hidden_size": -1}, "mup_base_hidden_size must be a positive number"),
        ({**MUP, "mup_base_head_dim": -1.0}, "mup_base_head_dim must be a number of at least 0"),
        ({**MUP, "mup_attn_scale_power": 1e300}, "mup_attn_scale_power is 1e.300, more than 2"),
        (
            {
                **MUP,
                "heterogeneous_layers_config_encoded_json": (
                    '[{}, {"attention": {"kv_channels": 8}}]'
                ),
            },
            "use_mup has one softmax_scale for all layers, but layer 1 has other kv_channels",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**SIZES, **fields)


def test_a_wider_model_has_the_ratio_of_its_own_width() -> None:
    base = GPTConfig(**SIZES, use_mup=True)
    wide = dataclasses.replace(base, hidden_size=128, logits_scaling=1.0)
    assert wide.width_multiplier == 2.0
    assert wide.hidden_init == {"init_method_std": 0.02 / math.sqrt(2)}
    assert set(wide.width_ratios().values()) == {(2.0, 2.0), (1.0, 2.0)}
    assert base.hidden_init == GPTConfig(**SIZES).width_ratios() == {}
