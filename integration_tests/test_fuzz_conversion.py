"""Damaged configurations in a conversion, which uses two packages."""

import contextlib
import json

import pytest
import torch
from fuzzing import fuzz, mutate_json
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    ModelRecord,
    View,
    export_hf,
    import_hf,
)
from megatron_ckpt.store.blocks import digest
from megatron_ckpt.store.manifest import MANIFEST, Manifest
from megatron_models import GPTConfig, parameter_shapes, record_of

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=19,
    max_position_embeddings=8,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


class PlannedError(Exception):
    """Raised when a conversion reaches the first tensor to write."""


def stop(_):
    raise PlannedError


@pytest.fixture
def store(tmp_path):
    shapes = parameter_shapes(CONFIG)
    state = {name: [View.whole(torch.ones(shape))] for name, shape in shapes.items()}
    store = CheckpointStore(tmp_path / "run")
    store.save(1, state, model=ModelRecord(family="llama", **record_of(CONFIG)))
    return store


def test_config_json(store, tmp_path, fuzz_count):
    folder = export_hf(store.directory, tmp_path / "theirs")
    path = folder / "config.json"

    def read(content):
        path.write_bytes(content)
        with contextlib.suppress(PlannedError):
            import_hf(folder, tmp_path / "again", on_start=stop)

    fuzz(read, [path.read_bytes()], CheckpointError, count=fuzz_count, mutate=mutate_json)


def test_the_record_of_the_model(store, tmp_path, fuzz_count):
    """Checks damaged records with a valid digest; `Checkpoint` reads the content of the test."""
    checkpoint = store.latest_checkpoint()
    seed = json.dumps({"family": "llama", "config": CONFIG.to_dict()}).encode()

    def read(content):
        with contextlib.suppress(PlannedError):
            export_hf(forged(checkpoint, content), tmp_path / "back", on_start=stop)

    fuzz(read, [seed], CheckpointError, count=fuzz_count, mutate=mutate_json)


def forged(checkpoint, record):
    """Returns the checkpoint with another record in its manifest, as if read from a file."""
    blank = "0" * 32
    content = json.loads(checkpoint.manifest.to_bytes())
    try:
        content = {**content, "model": json.loads(record), "digest": blank}
        data = json.dumps(content).encode()
    except (ValueError, RecursionError):
        raise CheckpointError("no JSON, which a reader of the manifest says") from None
    data = data.replace(blank.encode(), digest(data).encode(), 1)
    return Checkpoint(checkpoint.path, Manifest.from_bytes(data, checkpoint.path / MANIFEST))
