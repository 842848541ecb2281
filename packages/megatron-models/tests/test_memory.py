import pytest
import torch
from megatron_models.errors import ConfigError
from megatron_models.fused_operations import FUSED, SEPARATE
from megatron_models.memory import training_memory
from megatron_models.models.gpt.model import GPT
from megatron_models.parameters import parameter_count
from megatron_models.placement import Placement
from megatron_parallel import Mesh, ParallelLayout, RecomputeConfig
from megatron_parallel.tensor_parallel import LinearCrossEntropy, LoRA, freeze_all_but_adapters

OF_CPU = {**dict.fromkeys(FUSED, SEPARATE), "attention": "torch"}
"""Choices by which a CUDA device computes what a CPU does."""


def saved_for_backward(model, tokens):
    """Returns the bytes of all storages that autograd saves, without parameters and tables."""
    own = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(tokens, tokens)
    return sum(size for size, _ in saved.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_estimated_activations_equal_those_that_autograd_saves(config, precision):
    model = GPT(config, Placement(Mesh.single(), dtype=getattr(torch, precision)))
    tokens = torch.randint(config.vocab_size, (3, 15))
    saved = saved_for_backward(model, tokens)
    if config.multi_latent_attention and config.v_head_dim < config.kv_channels:
        # Fused attention on CPUs pads values, and thus its output, to the width of keys.
        padding = 2 * config.num_attention_heads * (config.kv_channels - config.v_head_dim)
        padding += config.num_attention_heads * config.v_head_dim  # the output without padding
        saved -= config.num_layers * tokens.numel() * padding * model.dtype.itemsize
    estimate = training_memory(config, 15, 3, precision, backends=OF_CPU).activations
    if config.normalization == "LayerNorm":
        if config.apply_layernorm_1p and precision == "bfloat16":
            # GPUs save inputs, gains and shifts of norms in float32, CPUs in bfloat16.
            norms = 2 * config.num_layers + 1
            saved += norms * config.hidden_size * (tokens.numel() * (4 - 2) + 2 * 4)
        assert estimate == pytest.approx(saved, rel=0.02)
    else:  # unfused on CPUs, which saves up to two more float32 tensors
        widths = (2 * config.num_layers + 1) * config.hidden_size
        if config.qk_layernorm and config.multi_latent_attention:
            widths += config.num_layers * (config.q_lora_rank + config.kv_lora_rank)
        elif config.qk_layernorm:
            heads = config.num_attention_heads + config.num_query_groups
            widths += config.num_layers * heads * config.kv_channels
        assert estimate <= saved <= estimate + widths * tokens.numel() * 8


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [False, True])
def test_estimated_activations_of_experts(small, precision, gated):
    changes = {"activation": "swiglu", "add_bias_linear": False} if gated else {}
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_layer_freq": "2"}
    config = small(**experts, **changes, moe_shared_expert_intermediate_size=16)
    model = GPT(config, Placement(Mesh.single(), dtype=getattr(torch, precision)))
    tokens = torch.randint(config.vocab_size, (3, 15))
    saved = saved_for_backward(model, tokens)
    estimate = training_memory(config, 15, 3, precision, backends=OF_CPU).activations
    assert estimate == pytest.approx(saved, rel=0.03)


def test_parameters_gradients_and_moments(small):
    config = small(hidden_size=64, vocab_size=500)
    count = parameter_count(config, padded=True)
    full, half = (training_memory(config, 8, 1, p) for p in ("float32", "bfloat16"))
    assert (full.parameters, full.gradients, full.optimizer) == (4 * count, 4 * count, 8 * count)
    assert (half.parameters, half.gradients, half.optimizer) == (2 * count, 4 * count, 12 * count)
    assert full.total == 16 * count + full.activations
    assert training_memory(config, 8, 1, state_bytes=4).optimizer == 4 * count
    assert (
        training_memory(config, 8, 1, "bfloat16", state_bytes=0).optimizer == 4 * count
    )  # main parameter


def test_a_rank_of_several_holds_its_shard(small):
    config = small(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96)
    whole = training_memory(config, 8, 1)
    half = training_memory(config, 8, 1, layout=ParallelLayout(tp=2, dp=1), sequence_parallel=True)
    model = GPT(config, Mesh(ParallelLayout(tp=2, dp=1), 1))
    assert half.parameters == 4 * sum(p.numel() for p in model.parameters())
    tokens = 8 * 8  # replicated on every rank
    assert half.activations - tokens == pytest.approx((whole.activations - tokens) / 2, rel=0.05)
    stage = training_memory(config, 8, 1, layers=2, in_flight=2)
    first = GPT(config, Mesh(ParallelLayout(pp=2, dp=1), 0))
    assert stage.parameters == 4 * sum(p.numel() for p in first.parameters())
    again = RecomputeConfig(granularity="full", method="uniform", num_layers=2)
    saved = training_memory(config, 8, 1, layers=2, in_flight=2, recompute=again).activations
    assert saved == 2 * (8 * 64 * 4 + 8 * 8)


def test_ranks_of_every_axis_hold_the_parameters_of_their_model(small):
    """Elements of each rank's parameters, also of experts and of query groups fewer than ranks."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_layer_freq": "2"}
    cases = [
        ({}, ParallelLayout(tp=2, dp=1)),
        (experts, ParallelLayout(dp=2, ep=2)),
        (experts, ParallelLayout(dp=2, etp=2)),
        (experts | {"moe_shared_expert_intermediate_size": 16}, ParallelLayout(dp=4, ep=2, etp=2)),
    ]
    for changes, layout in cases:
        config = small(num_query_groups=1, **changes)
        model = GPT(config, Mesh(layout, 1))
        own = sum(p.numel() for p in model.parameters())
        assert training_memory(config, 8, 1, layout=layout).parameters == 4 * own, layout


def test_a_layout_without_a_number_of_data_parallel_ranks_is_refused(small):
    with pytest.raises(ConfigError, match="no data-parallel size"):
        training_memory(small(), 8, 1, layout=ParallelLayout(tp=2))


@pytest.mark.parametrize("roles", [["linear_qkv", "linear_fc2"], ["linear_fc1"]])
@pytest.mark.parametrize("changes", [{}, {"num_experts": 4, "moe_ffn_hidden_size": 20}])
def test_frozen_weights_have_no_gradients_and_no_state(small, roles, changes):
    products = dict.fromkeys(roles, LoRA(3, 6.0))
    config = small(**changes)
    model = GPT(config, Placement(Mesh.single(), products=products))
    freeze_all_but_adapters([model], products.values())
    held = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = training_memory(config, 15, 3, products=products)
    assert (found.parameters, found.gradients, found.optimizer) == (
        4 * held,
        4 * trained,
        8 * trained,
    )


@pytest.mark.parametrize(("gradients", "saves"), [("backward", "input"), ("forward", "gradients")])
def test_a_loss_in_slices_saves_no_logits(small, gradients, saves):
    config = small()
    loss = LinearCrossEntropy(7, gradients)
    model = GPT(config, Placement(Mesh.single(), vocabulary_loss=loss))
    tokens = torch.randint(config.vocab_size, (3, 15))
    saved = saved_for_backward(model, tokens)
    estimate = training_memory(config, 15, 3, loss_saves=saves).activations
    assert estimate == pytest.approx(saved, rel=0.02)
    if saves == "input":
        bound = training_memory(config, 15, 3).activations - 45 * config.padded_vocab_size * 4
        assert estimate < bound
