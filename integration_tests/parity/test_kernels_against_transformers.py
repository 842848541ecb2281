"""Rotary embedding and RMSNorm equal those of transformers' Llama."""

from typing import Any

import pytest
import torch
from megatron_kernels import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    rms_norm,
    rope,
    rope_frequencies,
    rope_tables,
)

transformers = pytest.importorskip("transformers")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")

HEAD = 32
LENGTH = 300

SCALINGS: dict[str, tuple[dict[str, Any], RopeScaling | None]] = {
    "default": ({"rope_type": "default"}, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 256),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
        YarnScaling(16.0, original_max_position_embeddings=256),
    ),
}


def embedding(theirs: dict[str, Any], base: float) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": base, **theirs},
        rope_theta=base,
        rope_scaling={"rope_theta": base, **theirs},
    )
    return llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", SCALINGS)
def test_rotated_queries_and_keys_equal_llamas(kind: str, base: float, backend: str) -> None:
    torch.manual_seed(5)
    theirs, ours = SCALINGS[kind]
    q, k = torch.randn(LENGTH, 2, 4, HEAD), torch.randn(LENGTH, 2, 2, HEAD)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 50])

    module = embedding(theirs, base)
    frequencies = rope_frequencies(HEAD, base, scaling=ours)
    torch.testing.assert_close(module.inv_freq, frequencies.float(), rtol=1e-6, atol=0)

    turned = llama.apply_rotary_pos_emb(
        *(x.permute(1, 2, 0, 3) for x in (q, k)), *module(q, positions)
    )
    cos, sin = rope_tables(positions, frequencies, scaling=ours)
    for expected, x in zip(turned, (q, k), strict=True):
        found = rope(x, cos, sin, backend=backend)
        torch.testing.assert_close(found, expected.permute(2, 0, 1, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_rms_norm_and_its_gradients_equal_llamas(backend: str) -> None:
    torch.manual_seed(5)
    module = llama.LlamaRMSNorm(48, eps=1e-6)
    with torch.no_grad():
        module.weight.normal_(1.0, 0.3)
    x = torch.randn(7, 3, 48, requires_grad=True)
    weights = torch.randn(7, 3, 48)
    expected = module(x)
    found = rms_norm(x, module.weight, 1e-6, backend=backend)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    inputs = (x, module.weight)
    theirs = torch.autograd.grad(expected, inputs, weights)
    ours = torch.autograd.grad(found, inputs, weights)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
