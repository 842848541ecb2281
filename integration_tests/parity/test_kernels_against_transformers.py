"""Rotary embedding and RMSNorm equal those of transformers' Llama, the delta rule Qwen3-Next's."""

from typing import Any

import pytest
import torch
from megatron_kernels import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    gated_delta_rule,
    rms_norm,
    rope,
    rope_frequencies,
    rope_tables,
)

transformers = pytest.importorskip("transformers")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")

QWEN3_NEXT = "transformers.models.qwen3_next.modeling_qwen3_next"
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


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_the_gated_delta_rule_and_its_gradients_equal_qwen3_nexts(name: str, backend: str) -> None:
    theirs = getattr(pytest.importorskip(QWEN3_NEXT), name)
    draw = torch.Generator().manual_seed(7)
    q, k = (torch.randn(LENGTH, 2, 2, 16, generator=draw) for _ in range(2))
    v = torch.randn(LENGTH, 2, 4, 8, generator=draw)
    decay = -torch.rand(LENGTH, 2, 4, generator=draw)
    beta = torch.rand(LENGTH, 2, 4, generator=draw)
    state = torch.randn(2, 4, 16, 8, generator=draw)
    given = [x.requires_grad_() for x in (q, k, v, decay, beta, state)]
    found = gated_delta_rule(*given[:5], None, state, True, backend=backend)
    y, last = theirs(
        *(x.transpose(0, 1) for x in given[:3]),
        g=decay.transpose(0, 1),
        beta=beta.transpose(0, 1),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(found.output, y.transpose(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.state, last, rtol=1e-4, atol=1e-5)
    ours, expected = (
        torch.autograd.grad(out.square().sum() + end.sum(), given)
        for out, end in ((found.output, found.state), (y, last))
    )
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
