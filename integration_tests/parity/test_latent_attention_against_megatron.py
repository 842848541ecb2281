"""Multi-latent attention equals that of megatron-core, which runs here on a CPU in one process."""

import dataclasses
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_models import GPT, GPTConfig, Placement
from megatron_names import name_in_megatron
from megatron_parallel import Mesh
from torch import Tensor, nn

LENGTH, VOCABULARY, HIDDEN = 24, 50, 32
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    ffn_hidden_size=48,
    vocab_size=VOCABULARY,
    make_vocab_size_divisible_by=1,
    max_position_embeddings=LENGTH,
    untie_embeddings_and_output_weights=True,
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    position_embedding_type="rope",
    rotary_interleaved=True,  # theirs rotates neighbouring channels with MLA, without a flag
    multi_latent_attention=True,
    qk_layernorm=True,
    kv_lora_rank=12,
    qk_head_dim=10,
    qk_pos_emb_head_dim=6,
    v_head_dim=8,
)
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 8.0,
    "rope_scaling_original_length": 8,
    "yarn_beta_fast": 4.0,
    "yarn_beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
CASES: dict[str, dict[str, Any]] = {
    "direct queries": {},
    "latent queries": {"q_lora_rank": 14},
    "latent queries, no norms of latents": {"q_lora_rank": 14, "qk_layernorm": False},
    "direct queries, YaRN": YARN,
    "latent queries, YaRN": {"q_lora_rank": 14, **YARN},
}


def build_theirs(megatron: SimpleNamespace, config: GPTConfig) -> nn.Module:
    """Returns their model of a configuration.

    Their attention in plain torch does not take the widths that their multi-latent attention
    passes. Its scores get their factor from there, and `kv_channels` is the width of its output.
    """

    class CoreAttention(megatron.attention.DotProductAttention):  # type: ignore[name-defined]
        def __init__(
            self, *values: Any, k_channels: int = 0, v_channels: int = 0, **more: Any
        ) -> None:
            super().__init__(*values, **more)

    yarn = config.rope_scaling_type == "yarn"
    settings = megatron.config.MLATransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        kv_channels=config.v_head_dim,
        ffn_hidden_size=config.ffn_hidden_size,
        q_lora_rank=config.q_lora_rank or None,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        qk_layernorm=config.qk_layernorm,
        layernorm_epsilon=config.norm_epsilon,
        rope_type="yarn" if yarn else "rope",
        rotary_base=config.rotary_base,
        rotary_scaling_factor=config.rope_scaling_factor,
        original_max_position_embeddings=config.rope_scaling_original_length,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    spec = megatron.specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=True,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    core = tuple(map(int, version("megatron-core").split(".")[:2]))
    if core >= (0, 19) and not config.q_lora_rank:
        pytest.skip("megatron-core 0.19 refuses its own specification of direct queries with norms")
    model: nn.Module = megatron.model.GPTModel(
        settings,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    )
    return model


def copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Gives both models the same random weights, with gains that are not 1."""
    found = dict(theirs.named_parameters())
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + ("norm.weight" in name))
            other = found.pop(name_in_megatron(name))
            other.copy_(parameter.view(other.shape))
    assert not found


def inputs() -> tuple[Tensor, Tensor]:
    """Returns tokens `[b, s]`, and the gradient of their logits `[b, s, v]`."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    return tokens, torch.randn(2, LENGTH, VOCABULARY, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_equal_megatrons(
    megatron: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, case: str, dtype: torch.dtype
) -> None:
    # Their module takes Transformer Engine as installed, whose classes are None here.
    monkeypatch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)
    config = dataclasses.replace(CONFIG, **CASES[case])
    theirs = build_theirs(megatron, config).to(dtype)
    ours = GPT(config, Placement(Mesh.single(), dtype=dtype))
    copy_weights(ours, theirs)
    tokens, gradient = inputs()
    positions = torch.arange(LENGTH).expand(2, -1)
    blocked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    expected = theirs(tokens, positions, blocked)
    expected.backward(gradient.to(dtype))
    logits = ours(tokens).transpose(0, 1)  # ours are [s, b, v]
    logits.backward(gradient.to(dtype))

    # Their tables of angles are float32 in both cases.
    close = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float64 else 2e-4}
    torch.testing.assert_close(logits, expected, **close)
    found = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other = found[name_in_megatron(name)].grad
        assert parameter.grad is not None and other is not None
        scale = other.abs().max()
        difference = (parameter.grad.view(other.shape) - other).abs().max() / scale
        assert difference < close["atol"], f"{name}: {difference:.1e}"
