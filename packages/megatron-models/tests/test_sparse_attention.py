"""Sparse latent attention against plain float64 code: selection, indexer loss, cache, documents."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import megatron_models.components.sparse_attention.module as sparse
import pytest
import torch
from megatron_kernels import Mask
from megatron_models import Dropout, LayerPass, SavedBytes
from megatron_models.cache import StaticKVCache
from megatron_models.components.sparse_attention.module import SparseAttention
from megatron_models.errors import ConfigError
from megatron_models.kinds import find_kind
from megatron_models.models.gpt.config import GPTConfig
from megatron_models.models.gpt.model import GPT
from megatron_models.placement import Placement
from megatron_parallel import AuxiliaryLosses, DropoutKey, Mesh, ParallelLayout

TOKENS, TOPK = 14, 5
SPARSE = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "rotary_interleaved": True,
    "normalization": "RMSNorm",
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 6,
    "dsa_indexer_topk": TOPK,
    "dsa_indexer_loss_coeff": 0.3,
}

OWN = ("dsa_", "experimental_")
PLAIN = {each.name: each.default for each in fields(GPTConfig)}


@pytest.fixture
def build(small, scramble):
    def make(**changes):
        config = small(**{**SPARSE, **changes})
        return scramble(GPT(config, Placement(Mesh.single(), dtype=torch.float64)))

    return make


def drawn(model, length=TOKENS, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (2, length), generator=draw)


def logits(model, *args, **kwargs):
    return model(*args, **kwargs)[..., : model.config.vocab_size]


def rotate_halves(x):
    """Rotates the first four channels of ``[s, ..., d]`` in two halves, by hand."""
    turned = x.clone()
    for t in range(len(x)):
        for pair in range(2):
            angle = t * 10000.0 ** (-2 * pair / 4)
            a, b = x[t, ..., pair], x[t, ..., pair + 2]
            turned[t, ..., pair] = a * math.cos(angle) - b * math.sin(angle)
            turned[t, ..., pair + 2] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def plain_scores(indexer, x, latent):
    """Computes the scores of one sequence ``[s, h]`` token by token: DeepSeek-V3.2, equation 1."""
    q = rotate_halves(torch.einsum("sr,ndr->snd", latent, indexer.q))
    k = x @ indexer.k.T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    k = rotate_halves(k * indexer.k_norm.weight + indexer.k_norm.bias)
    weights = x @ indexer.weights.T / math.sqrt(3 * 6)
    scores = torch.full((len(x), len(x)), -math.inf, dtype=x.dtype)
    for t in range(len(x)):
        for i in range(t + 1):
            scores[t, i] = sum(weights[t, j] * (q[t, j] @ k[i]).clamp(min=0) for j in range(3))
    return scores


def best_keys(scores, t):
    """Returns the best keys of token ``t``, the first of equal ones."""
    numbers = scores.tolist()
    return sorted(range(t + 1), key=lambda i: -numbers[i])[:TOPK]


def watched(model, call):
    """Returns what the attention of the last layer got: ``(x, latent, q, k, v)``."""
    layer = model.layers["1"].attention
    seen = {}
    selectors, attend = layer._selectors, layer._attend

    def note_selectors(x, latent, *rest):
        seen.update(x=x, latent=latent)
        return selectors(x, latent, *rest)

    def note_attend(context, q, k, v, *index):
        y = attend(context, q, k, v, *index)
        seen.update(q=q, k=k, v=v, y=y)
        return y

    layer._selectors, layer._attend = note_selectors, note_attend
    try:
        call()
    finally:
        del layer._selectors, layer._attend
    return {name: each.detach() for name, each in seen.items()}


def plain_probabilities(q, k, allowed, bound=0.0):
    """Returns the probabilities of one sequence ``[n, s, t]``."""
    scores = torch.einsum("snd,tnd->nst", q, k) / math.sqrt(q.shape[-1])
    if bound:
        scores = bound * torch.tanh(scores / bound)
    return torch.softmax(scores.masked_fill(~allowed, -math.inf), -1)


def test_each_query_attends_to_the_keys_with_the_best_scores(build):
    model = build()
    seen = watched(model, lambda: model(drawn(model)))
    for row in range(2):
        one = {name: each[:, row] for name, each in seen.items()}
        scores = plain_scores(model.layers["1"].attention.indexer, one["x"], one["latent"])
        allowed = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
        for t in range(TOKENS):
            allowed[t, best_keys(scores[t], t)] = True
        wanted = plain_probabilities(one["q"], one["k"], allowed)
        wanted = torch.einsum("nst,tnd->snd", wanted, one["v"])
        torch.testing.assert_close(one["y"], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("sparse_loss", "bound"), [(False, 0.0), (True, 0.0), (False, 0.5)])
def test_loss_and_gradients_of_the_indexer_equal_plain_code(build, sparse_loss, bound):
    model = build(dsa_indexer_use_sparse_loss=sparse_loss, attn_logit_softcapping=bound)
    tokens, losses = drawn(model), AuxiliaryLosses({"indexer_loss": 28.0})

    def run():
        model(tokens, labels=tokens, auxiliary_losses=losses).sum().backward()

    seen = watched(model, run)
    indexer = model.layers["1"].attention.indexer
    found = {name: each.grad.clone() for name, each in indexer.named_parameters()}
    indexer.zero_grad()
    total = 0.0
    for row in range(2):
        one = {name: each[:, row] for name, each in seen.items()}
        scores = plain_scores(indexer, one["x"], one["latent"])
        for t in range(TOKENS):
            keys = list(range(t + 1))
            if sparse_loss:
                keys = best_keys(scores[t], t)
            allowed = torch.zeros(1, TOKENS, dtype=torch.bool)
            allowed[0, keys] = True
            target = plain_probabilities(one["q"][t : t + 1], one["k"], allowed, bound)
            target = target.mean(0)[0, keys]
            total = total + (target * (target.log() - scores[t, keys].log_softmax(-1))).sum()
    (total * 0.3 / 28).backward()
    for name, each in indexer.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=1e-10, atol=1e-13, msg=name)


def test_the_loss_of_the_indexer_changes_no_other_gradient(build):
    model, tokens = build(), drawn(build())
    gradients = []
    for losses in (None, AuxiliaryLosses({"indexer_loss": 28.0})):
        model.zero_grad()
        model(tokens, labels=tokens, auxiliary_losses=losses).sum().backward()
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
    for name, without in gradients[0].items():
        if ".indexer." in name:
            assert not without.any() and gradients[1][name].any(), name
        else:
            assert torch.equal(without, gradients[1][name]), name


def test_blocks_of_queries_equal_all_queries(build, monkeypatch):
    model = build()
    key = DropoutKey.for_batch(seed=1, iteration=2, samples=torch.arange(2), positions=TOKENS)
    passes = [{}, {"dropout": Dropout(key, attention=0.4)}]
    whole = [logits(model, drawn(model), **options) for options in passes]
    assert not torch.allclose(*whole)
    monkeypatch.setattr(sparse, "BLOCK", 4)
    for options, expected in zip(passes, whole, strict=True):
        found = logits(model, drawn(model), **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_many_keys_are_all_keys(build):
    model = build(dsa_indexer_topk=TOKENS)
    dense = build(**{name: value for name, value in PLAIN.items() if name.startswith(OWN)})
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            parameter.copy_(own[name])
    found, wanted = (logits(each, drawn(model)) for each in (model, dense))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    few = build()
    few.load_state_dict(model.state_dict())
    assert (logits(few, drawn(model)) - wanted).abs().max() > 1e-3


def test_cached_tokens_equal_one_pass(build):
    model = build()
    tokens, cache = drawn(model), StaticKVCache(build().config, Mesh.single(), 2, 16, torch.float64)
    with torch.no_grad():
        passes = pairwise((0, 1, 7, 8, 14))
        parts = [logits(model, tokens[:, a:b], cache=cache) for a, b in passes]
        whole = logits(model, tokens)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


def test_packed_documents_equal_separate_documents(build):
    model = build()
    tokens = drawn(model)[:1]
    ids = torch.tensor([[0] * 6 + [1] * 8], dtype=torch.int32)
    positions = torch.cat((torch.arange(6), torch.arange(8)))[None].int()
    packed = logits(model, tokens, mask=Mask(document_ids=ids), positions=positions)
    alone = [logits(model, part) for part in (tokens[:, :6], tokens[:, 6:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-12)


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
MASKS = {
    "causal": Mask(),
    "documents": Mask(document_ids=NUMBERS),
    "dense": Mask(document_ids=NUMBERS).prepare(6, 6),
    "own queries": Mask(
        document_ids=NUMBERS, query_document_ids=torch.tensor([[0, 1, 1, 0, 0, 1]]).int()
    ),
    "own positions": Mask(
        positions=torch.arange(6).int()[None],
        query_positions=torch.tensor([[5, 3, 0, 1, 2, 4]]).int(),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_rows_of_a_mask_are_those_of_the_whole(name):
    device = torch.device("cpu")
    whole = MASKS[name].allowed(6, 6)
    for rows in (slice(0, 4), slice(2, 4), slice(4, 8)):
        found = sparse.allowed_rows(MASKS[name], rows, 6, 6, device)
        assert torch.equal(found, whole[:, rows])


def test_a_sequence_cannot_be_cut_over_context_parallel_ranks(build):
    config = build().config
    with pytest.raises(ConfigError, match="cp 2 cannot cut sparse attention"):
        config.check_layout(ParallelLayout(cp=2, dp=1))
    spec = config.mixers[0]
    mesh = Mesh(ParallelLayout(cp=2, dp=1), 0)
    with pytest.raises(ConfigError, match="cp 2 cannot cut sparse attention"):
        SparseAttention(spec, 0, Placement(mesh))


def test_flops_count_selected_keys_and_all_scores(build):
    config = build().config
    tokens = 100
    dense = replace(config, dsa_indexer_topk=tokens)
    per_layer = 3 * (6 + 1) * tokens * tokens // 2  # of the indexer
    less = dense.multiply_adds_of_pairs(tokens, tokens**2) - config.multiply_adds_of_pairs(
        tokens, tokens**2
    )
    pairs = sum(max(0, t + 1 - TOPK) for t in range(tokens))
    assert abs(less - 2 * 4 * (10 + 8) * pairs) <= 2 * 4 * 18 * tokens
    band = 4 * (10 + 8) * (2 * tokens * TOPK - TOPK**2) // 2  # as of a window, of each layer
    assert config.multiply_adds_of_pairs(tokens, tokens**2) == 2 * (band + per_layer)
    without = {name: value for name, value in PLAIN.items() if name.startswith(OWN)}
    more = config.multiply_adds.per_token - replace(config, **without).multiply_adds.per_token
    assert more == 2 * (3 * 6 * 14 + 6 * 24 + 3 * 24)  # queries, keys and weights of heads


@pytest.mark.parametrize(("size", "wide"), [(2, 4), (8, 8)])
def test_an_indexer_saves_its_inputs_and_the_selected_keys(build, size, wide):
    """Queries of 3 heads and the key have 6 channels; each also has a weight or a statistic."""
    mixer = build().config.mixers[0]
    found = mixer.activations(LayerPass(8, 3, SavedBytes(size)))
    assert found["indexer"] == 24 * (3 + 1) * (6 + 1) * wide + 24 * 8
    assert mixer.unsupported_reason("document_pool").setting == "{dsa_indexer_topk:name}"
    assert mixer.unsupported_reason("compile") is None
    assert mixer.auxiliary_losses() == ("indexer_loss",)
    assert replace(mixer, dsa_indexer_loss_coeff=0.0).auxiliary_losses() == ()


def test_layers_of_a_hybrid_model_decode_like_one_pass():
    kind = find_kind("hybrid")
    own = {name: value for name, value in SPARSE.items() if not name.startswith("experimental")}
    config = kind.config(
        hybrid_layer_pattern="MD*-",
        hidden_size=24,
        num_attention_heads=4,
        vocab_size=61,
        max_position_embeddings=16,
        mamba_num_groups=2,
        mamba_head_dim=4,
        mamba_state_dim=5,
        **own,
    )
    assert config.auxiliary_losses == ("indexer_loss",)
    (model,) = kind.build(config, Placement(Mesh.single(), dtype=torch.float64))
    tokens, cache = drawn(model), StaticKVCache(config, Mesh.single(), 2, 16, torch.float64)
    with torch.no_grad():
        passes = pairwise((0, 6, 7, 12, 14))
        parts = [logits(model, tokens[:, a:b], cache=cache) for a, b in passes]
        torch.testing.assert_close(torch.cat(parts), logits(model, tokens), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="dsa_indexer_n_heads 3 has no effect without a layer D"):
        replace(config, hybrid_layer_pattern="M**-")
