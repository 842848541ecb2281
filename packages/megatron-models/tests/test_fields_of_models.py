"""Which fields of models refuse 0 or negative numbers, have bounds, or do not change a model."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from megatron_models import (
    BertConfig,
    ConfigError,
    EncoderDecoderConfig,
    GPTConfig,
    HybridConfig,
    MambaModelConfig,
)
from megatron_models.components.fields import ComponentConfig

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}
HEADS = {**SIZES, "num_attention_heads": 4}
NEEDED: dict[type[ComponentConfig], dict[str, Any]] = {
    GPTConfig: HEADS,
    HybridConfig: {**HEADS, "hybrid_layer_pattern": "M-"},
    MambaModelConfig: SIZES,
    BertConfig: HEADS,
    EncoderDecoderConfig: HEADS,
}
POSITIVE: dict[type[ComponentConfig], tuple[str, ...]] = {
    GPTConfig: (
        *("num_layers", "hidden_size", "vocab_size", "max_position_embeddings"),
        *("init_method_std", "make_vocab_size_divisible_by", "embedding_multiplier"),
        *("logits_scaling", "residual_multiplier", "norm_epsilon", "num_attention_heads"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
        *("rotary_base", "rope_scaling_factor", "rope_scaling_low_freq_factor"),
        *("rope_scaling_high_freq_factor", "rope_scaling_original_length"),
        *("yarn_beta_fast", "yarn_beta_slow", "attn_temperature_floor"),
    ),
    MambaModelConfig: (
        *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_conv_kernel"),
        "mamba_chunk_size",
    ),
    EncoderDecoderConfig: ("relative_attention_num_buckets", "relative_attention_max_distance"),
}
DERIVED: dict[type[ComponentConfig], set[str]] = {
    GPTConfig: {
        *("num_labels", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        *("mup_base_hidden_size", "moe_router_group_score_topk"),
    },
    HybridConfig: {
        *("num_labels", "num_query_groups", "kv_channels", "ffn_hidden_size", "num_layers"),
        *("mamba_num_heads", "moe_router_group_score_topk"),
    },
    MambaModelConfig: {"num_labels", "mamba_num_heads"},
    BertConfig: {"num_labels", "num_query_groups", "kv_channels", "ffn_hidden_size"},
    EncoderDecoderConfig: {
        *("num_query_groups", "kv_channels", "ffn_hidden_size", "encoder_num_layers"),
    },
}
NONNEGATIVE: dict[type[ComponentConfig], tuple[str, ...]] = {
    GPTConfig: (
        *("final_logit_softcapping", "attn_logit_softcapping", "softmax_scale"),
        *("sliding_window", "attention_chunk_size", "attn_temperature_scale"),
        *("rotary_base_local", "rope_scaling_attention_factor", "mscale", "mscale_all_dim"),
        *("q_lora_rank", "latent_norm_epsilon", "dsa_indexer_loss_coeff"),
        *("mtp_num_layers", "mtp_loss_scaling_factor", "activation_func_clamp_value"),
        *("mup_base_head_dim", "mup_attn_scale_power"),
    ),
    MambaModelConfig: ("mamba_dt_min", "mamba_dt_max"),
    BertConfig: ("num_tokentypes", "position_offset"),
}
MAXIMA: dict[type[ComponentConfig], dict[str, int]] = {
    GPTConfig: {"num_layers": 100_000, "num_labels": 1_000_000, "mtp_num_layers": 1_000},
    MambaModelConfig: {"mamba_conv_kernel": 64},
    BertConfig: {"num_tokentypes": 1_000_000},
    EncoderDecoderConfig: {
        "encoder_num_layers": 100_000,
        "relative_attention_num_buckets": 2**20,
        "relative_attention_max_distance": 2**20,
    },
}


def kinds(base: type[ComponentConfig]) -> Iterator[type[ComponentConfig]]:
    """Yields the configurations and descriptions of components and models."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("megatron_models."):
            yield kind
            yield from kinds(kind)


def test_fields_are_given_by_name_since_a_new_component_changes_their_order() -> None:
    found = {*kinds(ComponentConfig)}
    assert {*NEEDED} < found
    assert not [kind for kind in found for each in fields(kind) if not each.kw_only]


def flat(table: dict[type[ComponentConfig], Any]) -> list[tuple[type[ComponentConfig], str]]:
    return [(kind, name) for kind, names in table.items() for name in sorted(names)]


def message(kind: type[ComponentConfig], name: str, value: float) -> str:
    """Returns the error of a model with a value of the type of a field, or nothing."""
    number = {each.name: each.type for each in fields(kind)}[name]
    try:
        kind(**{**NEEDED[kind], name: number(value)})  # type: ignore[operator]
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "name"), flat(POSITIVE))
def test_sizes_and_factors_are_above_0(kind: type[ComponentConfig], name: str) -> None:
    for value in (0, -1):
        assert message(kind, name, value).startswith(f"{name} must be a positive number, not")


@pytest.mark.parametrize(("kind", "name"), flat(DERIVED))
def test_a_derived_number_may_be_0_but_not_negative(kind: type[ComponentConfig], name: str) -> None:
    assert message(kind, name, 0) == ""
    assert message(kind, name, -1).startswith(f"{name} must be a ")
    assert {each.name for each in fields(kind) if each.metadata.get("derived")} == DERIVED[kind]


@pytest.mark.parametrize(("kind", "name"), flat(NONNEGATIVE))
def test_other_numbers_may_be_0_but_not_negative(kind: type[ComponentConfig], name: str) -> None:
    assert not message(kind, name, 0).startswith(f"{name} must be a ")
    assert message(kind, name, -1).startswith(f"{name} must be a number of at least 0, not -1")


@pytest.mark.parametrize(("kind", "name"), flat(MAXIMA))
def test_numbers_have_their_bounds(kind: type[ComponentConfig], name: str) -> None:
    bound = MAXIMA[kind][name]
    assert message(kind, name, bound + 1).startswith(f"{name} is {bound + 1}, more than {bound};")


def test_settings_of_memory_and_objectives_are_no_part_of_the_function_of_a_model() -> None:
    def marked(key: str) -> set[str]:
        """Returns the fields besides those of experts, which have a test of their own."""
        found = (each for kind in NEEDED for each in fields(kind) if each.metadata.get(key))
        return {each.name for each in found if not each.name.startswith("moe_")}

    mup = {"use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"}
    memory = {"make_vocab_size_divisible_by", "mamba_chunk_size"}
    assert marked("no_effect") == {*mup, *memory, "mtp_loss_scaling_factor"}
    assert marked("objective") == {
        *("mtp_loss_scaling_factor", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
    }
    assert marked("head") == {
        *("task_head", "num_labels", "head_pooling", "normalize_embedding"),
        *("masked_lm_head", "bert_binary_head", "bert_pooler"),
    }


def test_relative_distances_reach_beyond_the_buckets_of_one_distance_each() -> None:
    relative = {**HEADS, "position_embedding_type": "relative"}
    for buckets, nearest in ((8, 4), (9, 4)):  # half of the buckets are exact
        sizes = {**relative, "relative_attention_num_buckets": buckets}
        EncoderDecoderConfig(**sizes, relative_attention_max_distance=nearest + 1)
        with pytest.raises(ConfigError, match=f"use .* {nearest + 1} or more"):
            EncoderDecoderConfig(**sizes, relative_attention_max_distance=nearest)
