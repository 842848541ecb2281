"""Fuzz tests: damaged and forged files are read or refused with one line."""

import contextlib
import json

import pytest
import torch
from fuzzing import fuzz, mutate_bytes, mutate_json
from megatron_ckpt import Checkpoint, CheckpointError, CheckpointStore, ModelRecord, View
from megatron_ckpt.formats.huggingface import SafetensorsFolder
from megatron_ckpt.formats.special_tokens import special_token_ids
from megatron_ckpt.formats.weight_files import find_weight_files
from megatron_ckpt.store.blocks import digest
from megatron_ckpt.values import dumps, loads
from safetensors.torch import save_file

ZEROS = b"0" * 32


@pytest.fixture
def saved(tmp_path):
    state = {
        "w": [View.whole(torch.arange(12.0).view(3, 4))],
        "w.exp_avg": [View.whole(torch.ones(3, 4))],
        "scalar": [View.whole(torch.tensor(2))],
        "n": 3,
    }
    record = ModelRecord("gpt", "gpt2", 1, {"num_layers": 2})
    files = {"tokenizer/tokenizer.json": b"{}"}
    return CheckpointStore(tmp_path).save(1, state, model=record, files=files)


def read_all(path):
    checkpoint = Checkpoint(path)
    for name in checkpoint.tensors:
        checkpoint.read_tensor(name)
    checkpoint.values()
    checkpoint.verified_folder("tokenizer")


def test_damaged_manifests(saved, fuzz_count):
    path = saved / "MANIFEST.json"

    def read(content):
        path.write_bytes(content)
        read_all(saved)

    fuzz(read, [path.read_bytes()], CheckpointError, count=fuzz_count, mutate=mutate_bytes)


def test_forged_manifests(saved, fuzz_count):
    """Returns a manifest with the digest of its forged content."""
    path = saved / "MANIFEST.json"

    def read(content):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            content = json.dumps({**json.loads(content), "digest": ZEROS.decode()}).encode()
        path.write_bytes(content.replace(ZEROS, digest(content).encode(), 1))
        read_all(saved)

    seeds = [path.read_bytes()]
    tally = fuzz(read, seeds, CheckpointError, count=fuzz_count, mutate=mutate_json)
    assert tally.read > 0  # the refusals are not due to the digest


def test_long_names_in_messages_are_shortened():
    with pytest.raises(CheckpointError, match=r"^tensor 'x{900,1000} \.\.\. x{300,}' is unknown$"):
        raise CheckpointError(f"tensor {'x' * 99_999!r} is unknown")
    assert str(CheckpointError("x" * 1500)) == "x" * 1500


def test_stored_values(fuzz_count):
    value = {"a": [1, 2.5, None, True], "b": {1: (b"x", float("nan"))}, "c": {"d": {"e": "f"}}}
    seed = dumps(value, "value").encode()
    fuzz(loads, [seed], CheckpointError, count=fuzz_count, mutate=mutate_json)


def test_weight_indices(tmp_path, fuzz_count):
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    path = tmp_path / "model.safetensors.index.json"

    def read(content):
        path.write_bytes(content)
        SafetensorsFolder(tmp_path, find_weight_files(tmp_path, {}).names, "net.").meta()

    index = {"metadata": {"total_size": 20}, "weight_map": {n: f"{n}.safetensors" for n in tensors}}
    seeds = [json.dumps(index).encode()]
    fuzz(read, seeds, CheckpointError, count=fuzz_count, mutate=mutate_json)


def mutate_header(rng, content):
    """Returns a safetensors file with a damaged JSON header or damaged bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    end = 8 + int.from_bytes(content[:8], "little")
    head = mutate_json(rng, content[8:end])
    return len(head).to_bytes(8, "little") + head + content[end:]


def test_safetensors_files(tmp_path, fuzz_count):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.int64)}, path)

    def read(content):
        path.unlink()  # the former file may still be mapped
        path.write_bytes(content)
        folder = SafetensorsFolder(tmp_path, [path.name])
        folder.meta()
        for name in folder:
            folder[name]

    seeds = [path.read_bytes()]
    fuzz(read, seeds, CheckpointError, count=fuzz_count, mutate=mutate_header)


def test_special_tokens(fuzz_count):
    added = [{"content": "<s>", "id": 0}, {"content": "</s>", "id": 1}]
    tokenizer = {"model": {"vocab": {"a": 2}}, "added_tokens": added}
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}

    def read(content):
        special_token_ids({"tokenizer.json": content, "tokenizer_config.json": content})

    seeds = [json.dumps(each).encode() for each in (tokenizer, config, {**tokenizer, **config})]
    fuzz(read, seeds, CheckpointError, count=fuzz_count, mutate=mutate_json)
