"""Fixtures: run-time checks of tensor annotations, and small models with varied output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checked_shapes import check_shapes

check_shapes(["megatron_infer"])

import pytest  # noqa: E402
import torch  # noqa: E402
from megatron_ckpt import CheckpointStore, ModelRecord  # noqa: E402
from megatron_data import ByteTokenizer  # noqa: E402
from megatron_models import (  # noqa: E402
    GPT,
    CausalConfig,
    GPTConfig,
    HybridConfig,
    MambaModelConfig,
    Placement,
    gpt_chunks,
    record_of,
)
from megatron_parallel import Mesh, collect_shardings, parameter_views  # noqa: E402

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
    "axes": {
        "position_embedding_type": "mrope",
        "mrope_section": (1, 2, 1),
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
    "sparse": {
        "position_embedding_type": "rope",
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 6,
        "dsa_indexer_topk": 3,
    },
}
STATE = {"mamba_num_groups": 4, "mamba_head_dim": 4, "mamba_state_dim": 5, "mamba_chunk_size": 3}
DELTA = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
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


@pytest.fixture
def byte_model(make_model: Callable[..., GPT]) -> GPT:
    """Returns a GPT for the tokens of bytes."""
    return make_model(vocab_size=257, dtype=torch.float32)


@pytest.fixture
def save_run(byte_model: GPT, tmp_path: Path) -> Callable[..., str]:
    """Returns a function that saves a run with one checkpoint of `byte_model`.

    The function takes contents of more files by their paths in the checkpoint, and returns the
    folder of the run.
    """

    def save(files: dict[str, str] | None = None) -> str:
        ByteTokenizer().save(tmp_path / "tokenizer")
        attached: dict[str, Path | bytes] = {"tokenizer": tmp_path / "tokenizer"}
        attached |= {name: text.encode() for name, text in (files or {}).items()}
        CheckpointStore(tmp_path / "run").save(
            3,
            parameter_views(byte_model, collect_shardings(byte_model), Mesh.single()),
            model=ModelRecord(family="gpt2", **record_of(byte_model.config)),
            files=attached,
        )
        return str(tmp_path / "run")

    return save


def shape(kind: str, vocab_size: int, positions: int, layers: int) -> CausalConfig:
    """Returns the configuration of a tiny model."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "make_vocab_size_divisible_by": 16,
        "init_method_std": 0.3,
    }
    if kind == "mamba":
        return MambaModelConfig(**sizes, **STATE, num_layers=layers)
    sizes["num_attention_heads"] = 4
    if kind == "hybrid":
        return HybridConfig(**sizes, **STATE, **DELTA, hybrid_layer_pattern="MG*M"[:layers])
    return GPTConfig(**sizes, **KINDS[kind], num_layers=layers)
