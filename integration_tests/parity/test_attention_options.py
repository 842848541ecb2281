"""Options of one attention layer against the attention of models in transformers."""

from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models.components.attention.module import Attention
from megatron_models.components.context import Context
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.layers import attention_mixer
from megatron_models.models.gpt.model import GPT
from megatron_models.placement import Placement
from megatron_parallel import Mesh
from torch import Tensor, nn

S, B, H, HEADS, GROUPS, D = 11, 2, 24, 4, 2, 8


def gpt(**changes: Any) -> GPT:
    """Returns a model whose layers have the widths of the others' attention."""
    config = GPTConfig(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D,
        vocab_size=32,
        max_position_embeddings=S,
        add_bias_linear=False,
        normalization="RMSNorm",
        **changes,
    )
    return GPT(config, Placement(Mesh.single(), dtype=torch.float32))


def copy_projections(ours: Attention, theirs: nn.Module) -> None:
    """Gives our fused projection the rows of their projections, and our output theirs."""
    rows = [
        projection.weight.view(GROUPS, -1, H)
        for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    ]
    if rows[0].shape[1] == 2 * (HEADS // GROUPS) * D:  # each head's query, then its gate
        by_role = rows[0].view(GROUPS, -1, 2, D, H)
        rows[:1] = [by_role[:, :, role].flatten(1, 2) for role in (0, 1)]
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat(rows, 1))
        ours.out.weight.copy_(theirs.o_proj.weight.view_as(ours.out.weight))


def run(model: GPT, layer: int, x: Tensor) -> Tensor:
    """Returns what our attention layer computes for ``x`` ``[b, s, h]``."""
    context = Context(Mask(), model.rotary(S, 0, None))
    attention = model.layers[str(layer)].attention
    return attention(x.transpose(0, 1), context).transpose(0, 1)


def draw() -> Tensor:
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(3))


def causal() -> Tensor:
    return torch.full((S, S), -torch.inf).triu(1)[None, None]


@pytest.mark.parametrize("layer", [0, 1], ids=["rotated", "unrotated"])
def test_norms_and_temperatures_of_llama_4(layer):
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = llama4.Llama4TextConfig(
        hidden_size=H,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=D,
        num_hidden_layers=2,
        no_rope_layers=[1, 0],
        floor_scale=3,
        attn_scale=0.6,
        rms_norm_eps=0.01,
        max_position_embeddings=S,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(layer)
    theirs = llama4.Llama4TextAttention(config, layer)
    angles = llama4.Llama4TextRotaryEmbedding(config)(torch.zeros(()), torch.arange(S)[None])
    model = gpt(
        position_embedding_type="rope",
        rotary_interleaved=True,
        rotary_base=config.rope_parameters["rope_theta"],
        norm_epsilon=0.01,
        no_rope_freq="2",
        qk_l2_norm=True,
        attn_temperature_scale=0.6,
        attn_temperature_floor=3,
    )
    copy_projections(model.layers[str(layer)].attention, theirs)
    x = draw()
    expected, _ = theirs(x, angles, causal())
    torch.testing.assert_close(run(model, layer, x), expected, rtol=1e-5, atol=1e-6)


def test_output_gates_of_qwen3_next():
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=H,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=D,
        num_hidden_layers=1,
        partial_rotary_factor=1.0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
    )
    config._attn_implementation = "eager"
    torch.manual_seed(8)
    theirs = qwen.Qwen3NextAttention(config, 0)
    angles = qwen.Qwen3NextRotaryEmbedding(config)(torch.zeros(()), torch.arange(S)[None])
    model = gpt(
        position_embedding_type="rope",
        attention_output_gate=True,
        qk_layernorm=True,
        apply_layernorm_1p=True,
        norm_epsilon=config.rms_norm_eps,
    )
    ours = model.layers["0"].attention
    copy_projections(ours, theirs)
    with torch.no_grad():
        for own, other in ((ours.q_norm, theirs.q_norm), (ours.k_norm, theirs.k_norm)):
            own.weight.copy_(other.weight.normal_(std=0.3))
    x = draw()
    expected, _ = theirs(x, angles, causal())
    torch.testing.assert_close(run(model, 0, x), expected, rtol=1e-5, atol=1e-6)


def with_alibi(heads: int, **changes: Any) -> GPT:
    config = GPTConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=heads,
        vocab_size=32,
        max_position_embeddings=S,
        position_embedding_type="alibi",
        **changes,
    )
    return GPT(config, Placement(Mesh.single(), dtype=torch.float32))


def copy_fused(ours: Attention, theirs: nn.Module) -> None:
    """Copies projections whose rows are query, key and value of each head, as ours are."""
    with torch.no_grad():
        for own, other in ((ours.qkv, theirs.query_key_value), (ours.out, theirs.dense)):
            own.weight.copy_(other.weight.view_as(own.weight))
            own.bias.copy_(other.bias.view_as(own.bias))


@pytest.mark.parametrize("heads", [4, 6, 3])
def test_biases_of_bloom(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    config = bloom.BloomConfig(hidden_size=H, n_head=heads, n_layer=1)
    torch.manual_seed(heads)
    theirs = bloom.BloomAttention(config, 0).eval()
    model = with_alibi(heads)
    copy_fused(model.layers["0"].attention, theirs)
    x = draw()
    alibi = bloom.build_alibi_tensor(torch.ones(B, S), heads, torch.float32)
    expected = theirs(x, torch.zeros_like(x), alibi, causal())[0]
    torch.testing.assert_close(run(model, 0, x), expected, rtol=1e-5, atol=1e-6)


def test_scaled_biases_of_falcon():
    """Falcon rounds slopes to bfloat16, which 4 heads do not show."""
    falcon = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    config = falcon.FalconConfig(
        hidden_size=H, num_attention_heads=4, alibi=True, multi_query=False, bias=True
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    theirs = falcon.FalconAttention(config, 0).eval()
    model = with_alibi(4, scale_alibi=True)
    copy_fused(model.layers["0"].attention, theirs)
    x = draw()
    alibi = falcon.build_alibi_tensor(torch.ones(B, S), 4, torch.float32)
    expected = theirs(x, alibi, causal())[0]
    torch.testing.assert_close(run(model, 0, x), expected, rtol=1e-5, atol=1e-6)


def test_options_apply_to_the_layers_that_have_them():
    model = gpt(
        position_embedding_type="rope",
        no_rope_freq="2",
        qk_l2_norm=True,
        attn_temperature_scale=0.6,
    )
    mixers = [attention_mixer(model.config, number) for number in range(2)]
    assert [mixer.qk_l2_norm for mixer in mixers] == [True, False]
    assert [mixer.attn_temperature_scale for mixer in mixers] == [0.0, 0.6]
