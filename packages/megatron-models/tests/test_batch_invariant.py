"""Batch-invariant models: a row's logits have the same bits alone, in a batch and in chunks."""

from dataclasses import replace

import pytest
import torch
from megatron_models import (
    GPT,
    ConfigError,
    GPTConfig,
    Placement,
    StaticKVCache,
    batch_invariant,
)
from megatron_parallel import Mesh
from megatron_parallel.tensor_parallel import LoRA

SIZES = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 101}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
GPT2 = {"activation": "gelu_tanh"}
LENGTH = 150


def config_of(changes, **more):
    return GPTConfig(**SIZES, max_position_embeddings=LENGTH, **{**changes, **more})


def model_of(config, dtype, invariant=True):
    placement = Placement(Mesh.single(), dtype=dtype)
    return GPT(config, batch_invariant(config, placement) if invariant else placement)


def in_chunks(model, config, tokens, sizes, dtype):
    cache = StaticKVCache(
        config, Mesh.single(), batch_size=len(tokens), max_length=LENGTH, dtype=dtype
    )
    return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_logits_of_a_row_have_the_same_bits_alone_in_a_batch_and_in_chunks(changes, dtype):
    config = config_of(changes)
    model = model_of(config, dtype)
    tokens = torch.randint(101, (16, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        batch = model(tokens)
        for row in (0, 5, 15):
            alone = model(tokens[row : row + 1])
            assert torch.equal(alone[:, 0], batch[:, row])
        chunks = in_chunks(model, config, tokens[3:5], (70, 1, 64, 1, 14), dtype)
        assert torch.equal(chunks, batch[:, 3:5])
        one_by_one = in_chunks(model, config, tokens[7:8, :20], 1, dtype)
        assert torch.equal(one_by_one[:, 0], batch[:20, 7])
        assert torch.equal(model(tokens[9:12, :33]), batch[:33, 9:12])


def test_a_plain_model_is_not_batch_invariant():
    config = config_of(LLAMA)
    model = model_of(config, torch.float32, invariant=False)
    tokens = torch.randint(101, (16, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        batch = model(tokens)
        one_by_one = in_chunks(model, config, tokens[7:8, :20], 1, torch.float32)
    assert not torch.equal(one_by_one[:, 0], batch[:20, 7])


@pytest.mark.parametrize("changes", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_losses_and_gradients_equal_those_of_a_plain_model(changes):
    config = config_of(changes, final_logit_softcapping=3.0, attn_logit_softcapping=5.0)
    tokens = torch.randint(101, (2, 71), generator=torch.Generator().manual_seed(2))
    found = []
    for invariant in (False, True):
        model = model_of(config, torch.float64, invariant)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).sum()
        loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}})
    plain, invariant = found
    for name, expected in plain.items():
        torch.testing.assert_close(invariant[name], expected, rtol=1e-10, atol=1e-10)


def test_models_without_batch_invariant_operations_are_refused():
    placement = Placement(Mesh.single())
    experts = config_of(LLAMA, num_experts=4, moe_ffn_hidden_size=32)
    with pytest.raises(ConfigError, match="layers of MoESpec have no batch-invariant operations"):
        batch_invariant(experts, placement)
    lora = replace(placement, products={"linear_qkv": LoRA(2, 1.0)})
    with pytest.raises(ConfigError, match="products linear_qkv are not batch-invariant"):
        batch_invariant(config_of(LLAMA), lora)
    chosen = replace(placement, backends={"attention": "reference", "rope": "reference"})
    with pytest.raises(ConfigError, match="backends attention reference are not batch-invariant"):
        batch_invariant(config_of(LLAMA), chosen)
