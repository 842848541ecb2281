"""The rows that QK-Clip scales, and their factors, against megatron-core's."""

from types import SimpleNamespace

import pytest
import torch
from megatron_models import GPTConfig, Placement, find_kind, scores_name
from megatron_optim import QKClipConfig
from megatron_parallel import Mesh
from megatron_train.observation import Observation

attention = pytest.importorskip("megatron.core.transformer.attention")
latent = pytest.importorskip("megatron.core.transformer.multi_latent_attention")

CLIP = QKClipConfig(qk_clip=True, qk_clip_alpha=0.3, qk_clip_threshold=2.0)
LARGEST = torch.tensor([1.0, 5.0, 1.5, 1.9], dtype=torch.float64)


def scaled(**config):
    """Returns weights before and after they are multiplied by their factors."""
    model = GPTConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        vocab_size=31,
        max_position_embeddings=8,
        position_embedding_type="rope",
        add_bias_linear=False,
        **config,
    )
    stages = find_kind("gpt").build(model, Placement(Mesh.single(), dtype=torch.float64), seed=1)
    observation = Observation(model, stages, CLIP, 1, scores=False, outputs=False)
    factors = observation.factors({scores_name(0): LARGEST})
    before = {n: p.detach() for n, p in stages[0].named_parameters() if n in factors}
    assert before.keys() == factors.keys()
    return before, {name: weight * factors[name][..., None] for name, weight in before.items()}


def megatron(linears, **more):
    """Returns what megatron-core's functions read of a module."""
    weights = {n: SimpleNamespace(weight=torch.nn.Parameter(w)) for n, w in linears.items()}
    return SimpleNamespace(
        core_attention=SimpleNamespace(current_max_attn_logits=LARGEST.clone()),
        num_attention_heads_per_partition=4,
        **weights,
        **more,
    )


def rows(weight):
    return weight.flatten(0, 1).clone()


def test_query_groups():
    before, after = scaled(num_query_groups=2, kv_channels=4)
    ((name, weight),) = before.items()
    config = SimpleNamespace(qk_clip=True, qk_clip_alpha=0.3, qk_clip_threshold=2.0)
    module = megatron(
        {"linear_qkv": rows(weight)},
        config=config,
        num_query_groups_per_partition=2,
        query_projection_size=16,
        kv_projection_size=8,
    )
    of = attention.SelfAttention
    module._clip_linear_qkv = lambda each: of._clip_linear_qkv(module, each)
    with torch.no_grad():
        of.clip_qk(module)
    assert not torch.equal(after[name], weight)
    torch.testing.assert_close(
        rows(after[name]), module.linear_qkv.weight.detach(), rtol=1e-12, atol=0
    )


def test_latents():
    sizes = {"kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
    before, after = scaled(multi_latent_attention=True, q_lora_rank=6, **sizes)
    q, kv = sorted(before, key=lambda name: "kv_up" in name)
    config = SimpleNamespace(
        qk_clip=True, qk_clip_alpha=0.3, qk_clip_threshold=2.0, q_lora_rank=6, **sizes
    )
    module = megatron(
        {"linear_q_up_proj": rows(before[q]), "linear_kv_up_proj": rows(before[kv])},
        config=config,
        training=True,
        cache_mla_latents=False,
    )
    of = latent.MLASelfAttention
    module._clip_q_proj_weight = lambda each: of._clip_q_proj_weight(module, each)
    module._clip_kv_proj_weight = lambda each: of._clip_kv_proj_weight(module, each)
    with torch.no_grad():
        of.clip_qk(module)
    for name, found in ((q, module.linear_q_up_proj), (kv, module.linear_kv_up_proj)):
        assert not torch.equal(after[name], before[name])
        torch.testing.assert_close(rows(after[name]), found.weight.detach(), rtol=1e-12, atol=0)
