"""Fixtures: run-time checks of tensor annotations, and small models with varied output."""

from collections.abc import Callable

from jaxtyping import install_import_hook

install_import_hook("megatron_infer", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from megatron_models import GPT, GPTConfig, Placement, gpt_chunks  # noqa: E402
from megatron_parallel import Mesh  # noqa: E402

# Tensors are tiny, so that threads would only wait for each other.
torch.set_num_threads(1)

KINDS = {
    "gpt2": {"position_embedding_type": "learned_absolute"},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "num_query_groups": 2,
    },
    "window": {
        "position_embedding_type": "alibi",
        "sliding_window": 4,
        "attention_output_gate": True,
        "softmax_type": "off-by-one",
    },
    "llama4": {
        "position_embedding_type": "rope",
        "no_rope_freq": "2",
        "normalization": "RMSNorm",
        "qk_l2_norm": True,
        "attention_chunk_size": 5,
        "window_attn_skip_freq": "2",
        "attn_temperature_scale": 0.5,
        "attn_temperature_floor": 3,
    },
    "latent": {
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
    },
}


@pytest.fixture(scope="module")
def worker_pool_preload() -> tuple[str, ...]:
    return ("megatron_infer.load", "megatron_models.models.gpt.model")


@pytest.fixture(scope="session")
def make_model() -> Callable[..., GPT]:
    """Returns a function that builds a tiny GPT with large weights, so that its output varies."""

    def make(
        kind: str = "gpt2",
        *,
        vocab_size: int = 61,
        positions: int = 48,
        dtype: torch.dtype = torch.float64,
        mesh: Mesh | None = None,
        layers: int = 2,
    ) -> GPT:
        config = shape(kind, vocab_size, positions, layers)
        return GPT(config, Placement(mesh or Mesh.single(), dtype=dtype), seed=7)

    return make


@pytest.fixture(scope="session")
def make_stages() -> Callable[..., list[GPT]]:
    """Returns a function that builds all stages of a rank of a four-layer `make_model`."""

    def make(
        mesh: Mesh,
        kind: str = "gpt2",
        *,
        vocab_size: int = 61,
        positions: int = 48,
        dtype: torch.dtype = torch.float64,
        sequence_parallel: bool = False,
    ) -> list[GPT]:
        placement = Placement(mesh, dtype=dtype, sequence_parallel=sequence_parallel)
        return gpt_chunks(shape(kind, vocab_size, positions, 4), placement, seed=7)

    return make


def shape(kind: str, vocab_size: int, positions: int, layers: int) -> GPTConfig:
    """Returns the configuration of a tiny model."""
    return GPTConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        make_vocab_size_divisible_by=16,
        init_method_std=0.3,
        **KINDS[kind],
    )
