"""Values of components' fields: Megatron-LM's defaults, and what is refused."""

from dataclasses import fields

import pytest
from megatron_models import ConfigError, GPTConfig, MambaModelConfig

SIZES = {"num_layers": 2, "hidden_size": 64, "vocab_size": 61, "max_position_embeddings": 8}
GPT_SIZES = {**SIZES, "num_attention_heads": 4}
MUP = {"use_mup": True}
MTP = {"mtp_num_layers": 1}


def test_absent_fields_have_megatrons_defaults():
    gpt, mamba = GPTConfig(**GPT_SIZES), MambaModelConfig(**SIZES, mamba_num_groups=1)
    assert (gpt.norm_epsilon, gpt.init_method_std, gpt.ffn_hidden_size) == (1e-5, 0.02, 256)
    assert (gpt.mtp_num_layers, gpt.mtp_loss_scaling_factor) == (0, 0.1)
    assert (gpt.mup_base_head_dim, gpt.mup_attn_scale_power) == (0.0, 1.0)
    assert (gpt.normalization, gpt.activation, gpt.residual_multiplier) == ("LayerNorm", "gelu", 1)
    assert gpt.norm_bias and gpt.add_bias_linear and not gpt.apply_layernorm_1p
    assert (mamba.mamba_state_dim, mamba.mamba_head_dim, mamba.mamba_num_heads) == (128, 64, 2)
    assert (mamba.mamba_conv_kernel, mamba.mamba_chunk_size) == (4, 128)
    assert mamba.mamba_conv_bias and not mamba.mamba_proj_bias
    assert MambaModelConfig.__dataclass_fields__["mamba_num_groups"].default == 8


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        *((name, 0, {}) for name in ("num_layers", "hidden_size", "init_method_std")),
        *((name, 0, {}) for name in ("norm_epsilon", "residual_multiplier")),
        ("ffn_hidden_size", -1, {}),
        ("activation_func_clamp_value", -1.0, {"activation": "swiglu"}),
        *(("mtp_num_layers", value, {}) for value in (-1, 1001)),
        ("mtp_loss_scaling_factor", -1.0, MTP),
        ("mup_base_hidden_size", -1, MUP),
        ("mup_base_head_dim", -1.0, MUP),
        *(("mup_attn_scale_power", value, MUP) for value in (-1.0, 2.5)),
    ],
)
def test_values_out_of_range_are_refused(name, value, others):
    with pytest.raises(ConfigError, match=f"^{name} (must be|is) "):
        GPTConfig(**{**GPT_SIZES, **others, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"mamba_{name}", 0) for name in ("state_dim", "head_dim", "num_groups")),
        *((f"mamba_{name}", 0) for name in ("conv_kernel", "chunk_size")),
        ("mamba_num_heads", -1),
        *((f"mamba_{name}", -0.5) for name in ("dt_min", "dt_max")),
    ],
)
def test_values_of_recurrent_layers_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        MambaModelConfig(**{**SIZES, "mamba_num_groups": 1, name: value})


def test_the_largest_values_are_accepted():
    assert len(GPTConfig(**GPT_SIZES, mtp_num_layers=1000).multi_token()) == 1000
    assert GPTConfig(**GPT_SIZES, **MUP, mup_attn_scale_power=2).softmax_scale == 16.0**-2


def test_fields_of_training_need_not_be_expressed_by_a_family():
    unread = {
        each.name
        for config in (GPTConfig, MambaModelConfig)
        for each in fields(config)
        if each.metadata.get("no_effect")
    }
    mup = {"use_mup", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"}
    assert {*mup, "mtp_loss_scaling_factor", "mamba_chunk_size"} <= unread
    assert GPTConfig.__dataclass_fields__["mtp_loss_scaling_factor"].metadata["objective"]


def test_a_recurrent_layer_has_two_matrices_of_hidden_channels():
    config = MambaModelConfig(**SIZES, mamba_num_groups=2, mamba_head_dim=16, mamba_proj_bias=True)
    cuts = {
        name.removeprefix("layers.0.mamba."): spec.sharding
        for name, spec in config.parameters().items()
        if name.startswith("layers.0.mamba.")
    }
    matrices = {name for name, cut in cuts.items() if cut.hidden_matrix}
    assert matrices == {"in_proj.weight", "out_proj.weight"}
    decayed = {name for name, cut in cuts.items() if cut.weight_decay}
    assert decayed == {"in_proj.weight", "out_proj.weight", "conv.weight"}
