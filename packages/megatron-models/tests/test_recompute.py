from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import GPT, Dropout, FutureTokens, Placement, shift_within_documents
from megatron_models.components.context import Context
from megatron_models.components.stack import run_layers
from megatron_parallel import AuxiliaryLosses, DropoutKey, LayoutError, Mesh, RecomputeConfig
from megatron_parallel.recompute import count_saved_activations

PLANS = {
    "core attention": RecomputeConfig(granularity="selective"),
    "feed-forward": RecomputeConfig(granularity="selective", modules=("mlp",)),
    "norms": RecomputeConfig(granularity="selective", modules=("layernorm",)),
    "all modules": RecomputeConfig(
        granularity="selective", modules=("core_attn", "mlp", "layernorm")
    ),
    "uniform": RecomputeConfig(granularity="full", method="uniform", num_layers=2),
    "block": RecomputeConfig(granularity="full", method="block", num_layers=1),
    "host": RecomputeConfig(cpu_offloading_num_layers=2),
    "uniform in host": RecomputeConfig(
        granularity="full", method="uniform", num_layers=2, cpu_offloading_num_layers=9
    ),
}


def trained(config, plan, backward=True):
    """Returns loss and gradients with dropout, and the saved bytes."""
    model = GPT(config, Placement(Mesh.single(), dtype=torch.float64, recompute=plan))
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(config.vocab_size, (2, 2, 12), generator=generator)
    key = DropoutKey.for_batch(seed=1, iteration=5, samples=torch.arange(2), positions=12)
    with count_saved_activations(model) as saved:
        loss = model.loss(tokens, labels, dropout=Dropout(key, hidden=0.1, attention=0.2)).sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], saved


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_recomputation_with_dropout_is_bit_identical(small, plan):
    for config in (
        small(num_layers=3),
        small(num_layers=3, normalization="RMSNorm", activation="swiglu", num_query_groups=2),
    ):
        kept_all, everything = trained(config, RecomputeConfig())
        recomputed, saved = trained(config, plan)
        for ours, truth in zip(recomputed, kept_all, strict=True):
            assert torch.equal(ours, truth)
        assert saved.nbytes < everything.nbytes


@pytest.mark.parametrize("queries", [0, 14], ids=["direct queries", "latent queries"])
@pytest.mark.parametrize("others", [(), ("core_attn",), ("layernorm",), ("core_attn", "layernorm")])
def test_queries_keys_and_values_are_projected_again_from_latents(small, others, queries):
    """Compares results bit by bit, and bytes with those of the same plan without the module."""
    config = small(
        num_layers=3,
        multi_latent_attention=True,
        position_embedding_type="rope",
        qk_layernorm=True,
        q_lora_rank=queries,
        kv_lora_rank=10,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
    )
    kept_all, everything = trained(config, RecomputeConfig())
    before = everything
    if others:
        _, before = trained(config, RecomputeConfig(granularity="selective", modules=others))
    plan = RecomputeConfig(granularity="selective", modules=("mla_up_proj", *others))
    recomputed, saved = trained(config, plan)
    for ours, truth in zip(recomputed, kept_all, strict=True):
        assert torch.equal(ours, truth)
    assert saved.nbytes < before.nbytes


def of_layers(config, plan):
    """Returns the bytes that the layers of a model save, without embedding and loss."""
    model = GPT(config, Placement(Mesh.single(), recompute=plan))
    x = torch.randn(12, 2, config.hidden_size, requires_grad=True) * 1.0
    with count_saved_activations(model) as saved:
        run_layers(model.layers, x, Context(Mask(), recompute=plan), model.tp)
    return saved


def test_uniform_recomputation_saves_one_input_of_each_group(small):
    plan = RecomputeConfig(granularity="full", method="uniform", num_layers=4)
    assert of_layers(small(num_layers=8), plan).shapes == [(12, 2, 24)] * 2
    assert len(of_layers(small(num_layers=9), plan).shapes) == 3


def test_block_recomputation_recomputes_the_first_layers_and_saves_the_last(small):
    plan = RecomputeConfig(granularity="full", method="block", num_layers=5)
    config = small(num_layers=8)
    saved = of_layers(config, plan)
    assert saved.shapes[:5] == [(12, 2, 24)] * 5
    last = of_layers(replace(config, num_layers=3), RecomputeConfig())
    assert saved.shapes[5:] == last.shapes
    assert {name: n for name, n in saved.by_module.items() if name} == {
        f"layers.{int(number) + 5}{rest}": nbytes
        for name, nbytes in last.by_module.items()
        for number, rest in [(name.split(".")[1], name[len("layers.0") :])]
    }


def test_activations_of_the_first_layers_alone_are_in_host_memory(small):
    config = small(num_layers=4)
    saved = [
        of_layers(config, RecomputeConfig(cpu_offloading_num_layers=count)).nbytes
        for count in range(5)
    ]
    each = [more - less for more, less in pairwise(saved)]
    assert each == [each[0]] * 4 and each[0] > 0


@pytest.mark.parametrize(("method", "times"), [("uniform", 2), ("block", 1)])
def test_depths_are_computed_again_in_uniform_recomputation_alone(small, method, times):
    plan = RecomputeConfig(granularity="full", method=method, num_layers=1)
    config = small(mtp_num_layers=1)
    model = GPT(config, Placement(Mesh.single(), recompute=plan))
    runs = []
    model.mtp[0].register_forward_pre_hook(lambda *_: runs.append(1))
    tokens = torch.randint(config.vocab_size, (2, 9))
    mask = torch.ones(2, 9)
    future = FutureTokens(*(shift_within_documents(t, 1) for t in (tokens, tokens, mask, tokens)))
    future = future._replace(positions=future.positions % 9)
    losses = AuxiliaryLosses({"mtp_1 loss": 1.0})
    model(tokens, labels=tokens, future=future, auxiliary_losses=losses).sum().backward()
    assert len(runs) == times


def test_a_pass_without_gradients_saves_nothing_and_runs_once(small):
    plan = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
    config = small()
    model = GPT(config, Placement(Mesh.single(), recompute=plan))
    tokens = torch.randint(config.vocab_size, (2, 12))
    with torch.no_grad(), count_saved_activations(model) as saved:
        model.loss(tokens, tokens)
    assert saved.nbytes == 0


def test_distributed_activations_need_replicated_activations(small):
    plan = RecomputeConfig(
        granularity="full", method="uniform", num_layers=1, distribute_saved_activations=True
    )
    with pytest.raises(LayoutError, match="needs at least 2 tensor parallel ranks"):
        GPT(small(), Placement(Mesh.single(), recompute=plan))
