"""Shape annotations are checked at run time in every test, and configurations the tests share."""

from collections.abc import Callable
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Configurations check their own values; what they say about a wrong one is tested.
_CHECKED = [f"megatron_models.{room}" for room in ("cache", "gpt", "layers")]
install_import_hook(_CHECKED, "beartype.beartype")

from megatron_models.config import GPTConfig  # noqa: E402


@pytest.fixture
def small() -> Callable[..., GPTConfig]:
    """Make the configuration of a model small enough for float64; keywords replace its fields."""

    def make(**changes: Any) -> GPTConfig:
        values: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 24,
            "num_attention_heads": 4,
            "vocab_size": 61,
            "max_position_embeddings": 16,
            "ffn_hidden_size": 40,
        }
        return GPTConfig(**(values | changes))

    return make


@pytest.fixture(
    params=[
        {},
        {"activation": "gelu_tanh", "untie_embeddings_and_output_weights": True},
        {"add_bias_linear": False, "add_qkv_bias": True, "num_query_groups": 2},
        {"normalization": "RMSNorm", "num_query_groups": 1, "kv_channels": 10},
        {
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "num_query_groups": 2,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        },
        {"position_embedding_type": "rope", "activation": "swiglu", "rotary_interleaved": True},
        {"position_embedding_type": "rope", "rotary_percent": 0.34, "kv_channels": 12},
        {
            "position_embedding_type": "rope",
            "rope_scaling_type": "llama3",
            "rope_scaling_original_length": 8,
        },
        {"position_embedding_type": "rope", "rope_scaling_type": "linear"},
    ],
    ids=[
        "gpt2-exact-gelu",
        "untied",
        "qkv-bias-only",
        "multi-query-wide",
        "llama",
        "interleaved",
        "partial-rotary",
        "llama3-scaling",
        "linear-scaling",
    ],
)
def config(request: pytest.FixtureRequest, small: Callable[..., GPTConfig]) -> GPTConfig:
    """Every option of the model at least once."""
    return small(**request.param)
