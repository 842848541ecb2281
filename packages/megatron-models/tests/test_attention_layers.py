"""Layers of attention: what they report and refuse, packed rotations, and heads of a rank."""

import math

import pytest
import torch
from megatron_models import GPT, ConfigError, EncoderDecoderConfig, Placement
from megatron_models.cache import DenseKV, StaticKVCache
from megatron_models.components.attention.cross import CrossAttention
from megatron_models.components.attention.module import Attention
from megatron_models.components.attention.spec import AttentionSpec, CrossAttentionSpec
from megatron_models.components.latent_attention import module as latent_attention
from megatron_models.components.latent_attention.module import LatentAttention
from megatron_models.components.latent_attention.spec import LatentAttentionSpec
from megatron_models.components.measure import scores_name
from megatron_models.components.sparse_attention import module as sparse_attention
from megatron_parallel import AuxiliaryLosses, Mesh, ParallelLayout

F64 = torch.float64
LATENT = {
    "position_embedding_type": "rope",
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
SPARSE = {
    **LATENT,
    "q_lora_rank": 14,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 6,
    "dsa_indexer_topk": 5,
}


@pytest.mark.parametrize(
    ("changes", "scale", "reach"),
    [
        ({}, 6**-0.5, 9),
        ({"softmax_scale": 0.7, "num_query_groups": 2}, 0.7, 9),
        ({"sliding_window": 2}, 6**-0.5, 2),
        (LATENT, 10**-0.5, 9),
    ],
    ids=["plain", "scaled", "window", "latent"],
)
def test_every_layer_reports_the_largest_score_of_each_head(
    small, scramble, changes, scale, reach
) -> None:
    model = scramble(GPT(small(**changes), Placement(Mesh.single(), dtype=F64)))
    losses = AuxiliaryLosses({}, maxima={scores_name(layer): 4 for layer in range(2)})
    seen = {}

    def watched(number, attend):
        def attend_and_note(context, q, k, *rest):
            seen[number] = q.detach(), k.detach()
            return attend(context, q, k, *rest)

        return attend_and_note

    for number in range(2):
        layer = model.layers[str(number)].attention
        layer._attend = watched(number, layer._attend)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    model(tokens, labels=tokens, auxiliary_losses=losses)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    hidden = (distance < 0) | (distance >= reach)
    for number, (q, k) in seen.items():
        keys = k.repeat_interleave(4 // k.shape[2], 2)
        scores = torch.einsum("sbnd,tbnd->bnst", q, keys).masked_fill(hidden, -math.inf)
        expected = scale * scores.amax((0, 2, 3))
        torch.testing.assert_close(losses.maxima[scores_name(number)], expected)


ROPE = {"position_embedding_type": "rope"}
PACKED = Placement(Mesh.single(), dtype=F64, backends={"rope_qkv": "torch"})


@pytest.mark.parametrize("changes", [{}, {"rotary_interleaved": True, "rotary_percent": 0.7}])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_operation_rotates_and_separates_heads_as_several_do(
    small, scramble, groups, changes
) -> None:
    config = small(**ROPE, **changes, num_query_groups=groups)
    models = [
        scramble(GPT(config, placement))
        for placement in (Placement(Mesh.single(), dtype=F64), PACKED)
    ]
    layer = models[1].layers["0"].attention
    assert layer.packed_rope is not None and models[0].layers["0"].attention.packed_rope is None
    attend, heads = layer._attend, []
    layer._attend = lambda context, q, k, v: heads.append(k.shape[2]) or attend(context, q, k, v)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for model in models:
        losses = model.loss(tokens, tokens)
        gradients = torch.autograd.grad(losses.sum(), list(model.parameters()))
        cache = StaticKVCache(config, model.mesh, 2, 9, dtype=F64)
        with torch.no_grad():
            parts = [model(tokens[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
        found.append([losses.detach(), *gradients, *parts])
    assert heads == [4 if groups == 1 else groups]  # a single group is repeated, except in a cache
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "packs"),
    [
        (ROPE, True),
        ({}, False),
        ({**ROPE, "qk_layernorm": True}, False),
        ({**ROPE, "attention_output_gate": True}, False),
        ({**ROPE, "qk_l2_norm": True}, True),
    ],
)
def test_heads_are_separated_first_if_something_is_between(small, changes, packs) -> None:
    layer = GPT(small(**changes), PACKED).layers["0"].attention
    assert (layer.packed_rope is not None) == packs


WHOLE = {"qk_layernorm": True, "qk_layernorm_scope": "projection", "normalization": "RMSNorm"}


@pytest.mark.parametrize(
    ("groups", "tp", "rank", "head", "group", "sharing"),
    [
        (4, 2, 1, 2, 2, 1),
        (4, 4, 3, 3, 3, 1),
        (2, 2, 1, 2, 1, 1),
        (2, 4, 1, 1, 0, 2),
        (2, 4, 2, 2, 1, 2),
        (2, 4, 3, 3, 1, 2),
        (1, 2, 1, 2, 0, 2),
    ],
)
def test_a_rank_has_the_heads_that_follow_those_of_the_ranks_before(
    small, groups, tp, rank, head, group, sharing
) -> None:
    placement = Placement(Mesh(ParallelLayout(tp=tp, dp=1), rank), device="meta")
    spec = small(**WHOLE, num_query_groups=groups).component(AttentionSpec)
    own = Attention(spec, 0, placement)
    assert (own.first_head, own.q_norm.first_head, own.k_norm.first_head) == (head, head, group)
    assert (own.q_norm.channels, own.k_norm.channels) == (24, groups * 6 * sharing)
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 61}
    config = EncoderDecoderConfig(**sizes, max_position_embeddings=16, num_query_groups=groups)
    cross = CrossAttention(config.component(CrossAttentionSpec), 0, placement)
    assert cross.first_head == head
    assert own.ranks_per_group == cross.ranks_per_group == sharing
    latent = LatentAttention(small(**LATENT).component(LatentAttentionSpec), 0, placement)
    assert latent.first_head == head


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("changes", "gathered"), [(LATENT, 1), (SPARSE, 4)])
def test_what_all_ranks_share_is_gathered_from_parts_of_a_sequence_and_else_copied(
    small, changes, gathered, cut, monkeypatch
) -> None:
    """The rotated key; of an indexer the latents of queries, the keys and the weights too."""
    calls = []
    for module in (latent_attention, sparse_attention):
        monkeypatch.setattr(module, "gather_sequence", lambda x, _: calls.append("gather") or x)
    monkeypatch.setattr(latent_attention, "copy_to_axis", lambda x, _: calls.append("copy") or x)
    placement = Placement(Mesh.single(), sequence_parallel=cut)
    GPT(small(num_layers=1, **changes), placement)(torch.zeros(1, 2, dtype=torch.int64))
    assert calls == (["gather"] * gathered if cut else ["copy"])


class TokensOnly:
    """A cache of keys and values of heads."""

    length = 3

    def update(self, layer, k, v):
        return DenseKV(k, v)


class Opaque(TokensOnly):
    """A cache of latents whose handle does not show them."""

    def update_latent(self, layer, k, value_channels):
        return DenseKV(k, k)


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "cache", "message"),
    [
        (LATENT, TokensOnly(), "layer 0 caches latents, which a cache of type TokensOnly does not"),
        (SPARSE, TokensOnly(), "layer 0 caches latents, which a cache of type TokensOnly does not"),
        (SPARSE, Opaque(), "layer 0 reads cached keys of its indexer, .* DenseKV does not show"),
    ],
)
def test_caches_that_do_not_store_what_a_layer_reads_are_refused(
    small, changes, cache, message
) -> None:
    model = GPT(small(**changes), Placement(Mesh.single()))
    with pytest.raises(ConfigError, match=message):
        model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
