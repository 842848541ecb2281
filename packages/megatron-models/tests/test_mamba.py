"""Mamba-2 layers against straight-line code, and models of them: documents, decoding, counts."""

import math
from dataclasses import replace

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    GPT,
    ConfigError,
    HybridConfig,
    LayerPass,
    MambaModelConfig,
    Placement,
    SavedBytes,
    StaticKVCache,
    layer_activations,
    parameter_count,
    parameter_shapes,
    training_flops,
)
from megatron_models.components.context import Context
from megatron_parallel import Mesh, ParallelLayout, collect_shardings
from megatron_parallel.recompute import count_saved_activations
from torch.nn import functional

F64 = torch.float64
VOCAB = 61
SIZES = {
    "hidden_size": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "normalization": "RMSNorm",
    "mamba_num_groups": 2,
    "mamba_head_dim": 4,
    "mamba_state_dim": 5,
    "mamba_chunk_size": 6,
    "init_method_std": 0.3,
}
MAMBA = MambaModelConfig(num_layers=2, **SIZES)
HYBRID = HybridConfig(
    **SIZES,
    hybrid_layer_pattern="M*-MGE",
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_attention_heads=4,
    num_experts=4,
    position_embedding_type="rope",
    mamba_dt_min=0.01,
    mamba_dt_max=0.2,
    mamba_proj_bias=True,
)
SPARSE = HybridConfig(
    **SIZES,
    hybrid_layer_pattern="MD-",
    num_attention_heads=4,
    position_embedding_type="rope",
    multi_latent_attention=True,
    qk_layernorm=True,
    q_lora_rank=8,
    kv_lora_rank=6,
    qk_head_dim=4,
    qk_pos_emb_head_dim=4,
    v_head_dim=4,
    dsa_indexer_n_heads=2,
    dsa_indexer_head_dim=8,
    dsa_indexer_topk=5,
)
CONFIGS = pytest.mark.parametrize(
    "config", [MAMBA, HYBRID, SPARSE], ids=["mamba", "hybrid", "sparse"]
)


def build(config, dtype=F64):
    return GPT(config, Placement(Mesh.single(), dtype), seed=3)


def tokens(batch=2, length=20, seed=1):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model, given, **options):
    with torch.no_grad():
        return model(given, **options)[..., :VOCAB]


def by_hand(layer, spec, x):
    """Computes a layer token by token and head by head, with the weights of a module."""
    width, state = spec.mamba_group_width, spec.mamba_state_dim
    fused = torch.einsum("sbh,gwh->sbgw", x, layer.in_proj.weight)
    gate, inputs, dt = fused.split(spec.widths, -1)
    padded = functional.pad(inputs, (0, 0, 0, 0, 0, 0, spec.mamba_conv_kernel - 1, 0))
    mixed = sum(
        padded[tap : tap + len(x)] * layer.conv.weight[..., tap]
        for tap in range(spec.mamba_conv_kernel)
    )
    mixed = functional.silu(mixed + layer.conv.bias)
    outputs = []
    for group in range(spec.mamba_num_groups):
        values, b, c = mixed[:, :, group].split((width, state, state), -1)
        heads = []
        for inside in range(spec.mamba_heads_per_group):
            head = group * spec.mamba_heads_per_group + inside
            own = values[..., inside * spec.mamba_head_dim :][..., : spec.mamba_head_dim]
            now, read = torch.zeros(x.shape[1], spec.mamba_head_dim, state, dtype=x.dtype), []
            for t in range(len(x)):
                step = functional.softplus(dt[t, :, group, inside] + layer.dt_bias[head])
                decay = torch.exp(-step * layer.A_log[head].exp())
                added = torch.einsum("b,bd,bk->bdk", step, own[t], b[t])
                now = decay[:, None, None] * now + added
                read.append(torch.einsum("bdk,bk->bd", now, c[t]) + layer.D[head] * own[t])
            heads.append(torch.stack(read))
        y = torch.cat(heads, -1) * functional.silu(gate[:, :, group])
        scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + spec.norm_epsilon)
        outputs.append(y * scale * layer.norm.weight[group])
    return torch.cat(outputs, -1) @ layer.out_proj.weight.T


def test_a_layer_equals_straight_line_code():
    model = build(MAMBA)
    layer, spec = model.layers["0"].mamba, MAMBA.mixers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=F64))
    x = torch.randn(13, 2, 16, dtype=F64, requires_grad=True)
    found, expected = layer(x, Context(Mask())), by_hand(layer, spec, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    inputs = [x, *layer.parameters()]
    for ours, truth in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-11)


@CONFIGS
def test_decoding_equals_the_whole_sequence(config):
    model, given = build(config), tokens()
    cache = StaticKVCache(config, model.mesh, 2, 20, F64)
    for _ in range(2):  # the second time with a used cache
        bounds = ((0, 7), (7, 8), (8, 9), (9, 20))
        parts = [logits(model, given[:, a:b], cache=cache) for a, b in bounds]
        torch.testing.assert_close(torch.cat(parts), logits(model, given), rtol=0, atol=1e-12)
        assert cache.length == 20
        cache.truncate(0)


@CONFIGS
def test_a_document_does_not_depend_on_those_before_it(config):
    model, given = build(config), tokens()
    ids = torch.tensor([[4] * 9 + [2] * 11, [0] * 9 + [1] * 8 + [-1] * 3])
    found = logits(model, given, mask=Mask(document_ids=ids))
    positions = torch.arange(9, 20).expand(2, -1)
    alone = logits(model, given[:, 9:], positions=positions)
    torch.testing.assert_close(found[9:, 0], alone[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[9:17, 1], alone[:8, 1], rtol=0, atol=1e-12)
    assert (found[9:] - logits(model, given)[9:]).abs().amax() > 1e-3


@CONFIGS
def test_a_document_that_begins_in_decoding_does_not_see_the_state(config):
    model, given = build(config), tokens()
    ids = torch.tensor([[4] * 9 + [2] * 11, [0] * 12 + [1] * 8])
    mask = Mask(document_ids=ids)
    whole = logits(model, given, mask=mask)
    cache = StaticKVCache(config, model.mesh, 2, 20, F64)
    parts = []
    for start, stop in ((0, 9), (9, 12), (12, 13), (13, 20)):
        seen = Mask(document_ids=ids[:, :stop])
        parts.append(logits(model, given[:, start:stop], cache=cache, mask=seen))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


@CONFIGS
def test_padding_does_not_enter_the_state(config):
    model, given = build(config), tokens(1)
    cache = StaticKVCache(config, model.mesh, 2, 20, F64)
    both = given[:, :8].repeat(2, 1)
    both[1, 5:] = 7  # padding
    padding = torch.arange(8) >= torch.tensor([[8], [5]])
    logits(model, both, cache=cache, padding=padding)
    states = {layer: cache.read_state(layer) for layer in (0,)}
    alone = StaticKVCache(config, model.mesh, 1, 20, F64)
    logits(model, given[:, :5], cache=alone)
    for name, found in states[0].items():
        torch.testing.assert_close(found[1:], alone.read_state(0)[name], rtol=0, atol=1e-13)


def test_parameters_and_multiply_adds_are_those_of_the_paper():
    spec = MAMBA.mixers[0]
    inner, groups, state, heads, width = 32, 2, 5, 8, 16
    channels = inner + 2 * groups * state
    layer = width * (2 * inner + 2 * groups * state + heads) + channels * (4 + 1) + 3 * heads
    layer += inner + inner * width + width
    assert parameter_count(MAMBA) == VOCAB * width + 2 * layer + width
    shapes = parameter_shapes(MAMBA)
    built = build(MAMBA)
    assert [(name, view.shape) for name, view in collect_shardings(built).items()] == [
        (name, tuple(shape)) for name, shape in shapes.items()
    ]
    each = width * (2 * inner + 2 * groups * state + heads) + channels * 4 + inner * width
    each += 3 * inner * state  # a state is decayed, written and read
    assert training_flops(MAMBA, 8) == 6 * 8 * (2 * each + width * MAMBA.padded_vocab_size)
    assert spec.multiply_adds_of_state() == 3 * inner * state


def test_initial_decays_and_steps_have_the_ranges_of_mamba():
    config = replace(MAMBA, mamba_head_dim=1, mamba_num_heads=512)
    layer = build(config, torch.float32).layers["1"].mamba
    decays, steps = layer.A_log.exp(), functional.softplus(layer.dt_bias)
    assert 1 <= decays.min() < 2 and 15 < decays.max() <= 16
    assert steps.min() * 1.0001 >= 1e-3 and steps.max() <= 0.1001
    assert (
        abs(float(steps.detach().log().mean()) - math.log(1e-2)) < 0.2
    )  # uniform in the logarithm
    assert (layer.D == 1).all() and float(layer.conv.weight.detach().abs().max()) <= 0.5
    table = collect_shardings(layer)
    assert {name for name, cut in table.items() if cut.weight_decay} == {
        "in_proj.weight",
        "conv.weight",
        "out_proj.weight",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_activations_are_those_that_are_counted(dtype):
    model = build(MAMBA, dtype)
    x = torch.randn(12, 3, 16, dtype=dtype, requires_grad=True) * 1.0
    with count_saved_activations(model) as saved:
        model.layers["1"](x, Context(Mask()))
    found = {name.removeprefix("layers.1."): size for name, size in saved.by_module.items()}
    found["mamba"] = found.get("mamba", 0) + found.pop("mamba.in_proj", 0)
    bytes_of = SavedBytes.cpu(dtype.itemsize, "RMSNorm")
    terms = layer_activations(MAMBA, LayerPass(12, 3, bytes_of), layer=1)
    terms["mamba"] += terms.pop("mamba.in_proj")
    assert {n: b for n, b in found.items() if b} == {n: b for n, b in terms.items() if b}


def test_layouts_that_do_not_divide_the_groups_are_refused():
    with pytest.raises(ConfigError, match=r"tp 4 cannot cut mamba_num_groups 2 .*use tp 2"):
        MAMBA.check_layout(ParallelLayout(tp=4, dp=1))
    with pytest.raises(ConfigError, match=r"cp 2 cannot cut the 1 of mamba_num_groups 2 .* cp 1"):
        MAMBA.check_layout(ParallelLayout(tp=2, cp=2, dp=1))


def test_stages_of_a_pattern_are_those_between_its_bars():
    config = replace(HYBRID, hybrid_layer_pattern="M|*-MGE")
    two = ParallelLayout(pp=2, dp=1)
    assert config.stage_split(two) == (range(1), range(1, 6))
    assert HYBRID.stage_split(two) is None
    assert HybridConfig.from_json(config.to_json()) == HYBRID
    with pytest.raises(ConfigError, match="has 2 pipeline stages, but the layout has 4; use 3"):
        config.check_layout(ParallelLayout(pp=4, dp=1))
