"""Models that choose fused operations equal models that do not, on one rank and on two."""

from dataclasses import replace

import pytest
import torch
from megatron_kernels import DropoutSite, bias_dropout_add
from megatron_models import GPT, Dropout, GPTConfig, Placement, StaticKVCache, operations_of
from megatron_models.fused_operations import FUSED
from megatron_parallel import (
    DropoutKey,
    GradientBuffers,
    Mesh,
    ParallelLayout,
    collect_shardings,
    keyed_dropout,
    parameter_views,
)
from megatron_parallel.data_parallel import fuse_gradient_accumulation

LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=150,  # two ranks hold 128 rows each; the second has 22 rows of the vocabulary
    max_position_embeddings=16,
    num_query_groups=2,  # one for each of two ranks, whose keys and values are repeated
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
GPT2 = replace(
    LLAMA,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    untie_embeddings_and_output_weights=False,
    add_bias_linear=True,
)


def step(mesh, config, fused, sequence_parallel, hidden):
    """Returns losses and gradient shards of two micro-batches, and the fused weights."""
    names = [name for name in operations_of(config) if name in FUSED]
    backends = dict.fromkeys(names, "reference") if fused else {}
    placement = Placement(
        mesh, torch.float64, sequence_parallel=sequence_parallel, backends=backends
    )
    model = GPT(config, placement)
    table = collect_shardings(model)
    buffers = GradientBuffers(model.named_parameters(), table, mesh)
    fusion = fuse_gradient_accumulation([model], [buffers])
    losses = []
    for number in range(2):
        tokens = torch.randint(150, (2, 13), generator=torch.Generator().manual_seed(number))
        samples = torch.arange(2) + 2 * number
        key = DropoutKey.for_batch(seed=1, iteration=0, samples=samples, positions=12)
        buffers.begin(last=number == 1)
        dropout = Dropout(key, hidden=hidden) if hidden else None
        loss = model(tokens[:, :-1], labels=tokens[:, 1:], dropout=dropout)
        loss.mean().backward()
        losses.append(loss.detach())
    buffers.finish()
    views = parameter_views(buffers.gradients(), table, mesh)
    pieces = [(name, view.offsets, view.tensor.clone()) for name in views for view in views[name]]
    return losses, pieces, fusion.fused


@pytest.mark.parametrize("hidden", [0.0, 0.25], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_losses_and_gradients_on_two_ranks_equal_those_without_fused_operations(
    rank_pool, config, hidden
):
    losses, pieces, _ = step(Mesh.single(), config, False, False, hidden)
    whole = {name: values for name, _, values in pieces}
    results = rank_pool.run_mesh(ParallelLayout(tp=2, dp=1), step, config, True, True, hidden)
    for found, parts, fused in (step(Mesh.single(), config, True, False, hidden), *results):
        torch.testing.assert_close(found, losses, rtol=0, atol=1e-12)
        assert "embedding.word.weight" in fused
        for name, offsets, values in parts:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            torch.testing.assert_close(values, whole[name][box], rtol=0, atol=1e-12, msg=name)


def test_decoding_with_a_cache_equals_decoding_without_fused_operations():
    tokens = torch.randint(150, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for names in (FUSED, ()):
        chosen = [name for name in operations_of(LLAMA) if name in names]
        backends = dict.fromkeys(chosen, "reference")
        model = GPT(LLAMA, Placement(Mesh.single(), torch.float64, backends=backends))
        cache = StaticKVCache(LLAMA, Mesh.single(), 2, 16, dtype=torch.float64)
        with torch.no_grad():
            parts = [model(tokens[:, :4], cache=cache), model(tokens[:, 4:], cache=cache)]
        found.append(torch.cat(parts))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.75])
def test_bias_dropout_add_drops_the_elements_of_keyed_dropout(p):
    key = DropoutKey.for_batch(seed=2**40 + 3, iteration=9, samples=torch.arange(3), positions=7)
    x, residual = torch.randn(7, 3, 50, dtype=torch.float64), torch.randn(7, 3, 50).double()
    site = DropoutSite(*key.site_numbers(p, layer=5, site=2))
    found = bias_dropout_add(x, None, residual, key.word0, key.word1, site, backend="reference")
    expected = residual + keyed_dropout(x, p, key, layer=5, site=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
