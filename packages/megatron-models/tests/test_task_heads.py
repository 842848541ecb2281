"""Task heads of decoders: parameters, the token that is read, and what is refused."""

from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import (
    GPT,
    ConfigError,
    GPTConfig,
    MambaModelConfig,
    Placement,
    StaticKVCache,
    training_flops,
)
from megatron_parallel import Mesh

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "vocab_size": 61,
    "max_position_embeddings": 16,
}


def config(**fields: Any) -> GPTConfig:
    return GPTConfig(**SIZES, num_attention_heads=4, **fields)


def built(of: Any) -> GPT:
    return GPT(of, Placement(Mesh.single(), dtype=torch.float64))


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"task_head": "reward"}, 1),
        ({"task_head": "classification"}, 2),
        ({"task_head": "classification", "num_labels": 5}, 5),
        ({"task_head": "regression", "untie_embeddings_and_output_weights": True}, 1),
        ({"task_head": "multiple_choice"}, 1),
        ({"task_head": "embedding"}, 24),
    ],
)
def test_a_head_replaces_the_output_matrix(fields: dict[str, Any], width: int) -> None:
    model = built(config(**fields))
    listed = {name: spec.sharding.shape for name, spec in model.config.parameters().items()}
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert found.keys() == listed.keys()
    assert "output.weight" not in listed
    if width < 24:
        assert found["sequence_head.out.weight"] == (width, 24)
    tokens = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(1))
    assert model(tokens).sequences.shape == (3, width)


@pytest.mark.parametrize(
    "of",
    [
        config(task_head="reward"),
        MambaModelConfig(
            **SIZES, mamba_head_dim=8, mamba_state_dim=4, mamba_num_groups=2, task_head="reward"
        ),
    ],
    ids=["gpt", "mamba"],
)
def test_a_reward_reads_the_last_token_that_is_no_padding(of: Any) -> None:
    model = built(of)
    tokens = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([9, 6, 1])
    ids = -(torch.arange(9) >= ends[:, None]).int()
    stream, scores = model(tokens, mask=Mask(document_ids=ids))
    last = stream[ends - 1, torch.arange(3)]
    expected = last @ model.sequence_head.out.weight.t()
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-12)
    # Padding does not matter.
    other = tokens.where(ids >= 0, (tokens + 5) % 61)
    assert torch.equal(model(other, mask=Mask(document_ids=ids)).sequences, scores)
    # Without padding the last token counts.
    whole = model(tokens)
    expected = whole.tokens[-1] @ model.sequence_head.out.weight.t()
    torch.testing.assert_close(whole.sequences, expected, rtol=1e-12, atol=1e-12)


def test_flops_count_the_head_once_a_sequence() -> None:
    head, body = config(task_head="reward"), config(task_head="embedding")
    assert training_flops(head, 8, 24) - training_flops(body, 8, 24) == 3 * 2 * 3 * 24


def test_a_head_does_not_decode() -> None:
    model = built(config(task_head="reward"))
    reason = model.config.unsupported_reason("decode")
    assert reason is not None and "whole sequences" in reason.reason
    assert model.config.unsupported_reason("compile") is None
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    cache = StaticKVCache(model.config, model.mesh, 1, 8, dtype=torch.float64)
    with pytest.raises(ConfigError, match="does not decode"):
        model(tokens, cache=cache)
    with pytest.raises(ConfigError, match="has no logits"):
        model(tokens, labels=tokens)
