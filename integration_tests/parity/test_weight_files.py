"""Of several files of weights, those that transformers reads are read, or none is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import cases
from families.comparison import text
from families.parity import LIMIT, error, our_logits, our_model
from families.theirs import their_logits, their_model, write
from megatron_ckpt import CheckpointError
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder of a Llama with one file of weights."""
    return write(their_model(cases()["llama"], {}), tmp_path / "llama", dtype="float32")


def shard(folder: Path, scale: float) -> None:
    """Writes all weights, multiplied, as two shards and an index."""
    weights = {name: tensor * scale for name, tensor in load_file(folder / WEIGHTS).items()}
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    index = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def check_equal(folder: Path) -> None:
    tokens = text(40)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = their_logits(theirs.eval(), tokens)
    assert error(our_logits(our_model(folder), tokens), expected) <= LIMIT


def test_one_file_beside_an_index_whose_shards_are_gone(folder: Path) -> None:
    shard(folder, 2.0)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    check_equal(folder)


def test_shards_alone(folder: Path) -> None:
    shard(folder, 2.0)
    (folder / WEIGHTS).unlink()
    check_equal(folder)


def test_a_file_that_the_configuration_names(folder: Path) -> None:
    shard(folder, 2.0)
    shutil.move(folder / "model-00001-of-00002.safetensors", folder / "first.safetensors")
    config = json.loads((folder / "config.json").read_text())
    other = {name: tensor * 1.1 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(other, folder / "other.safetensors", {"format": "pt"})
    config["transformers_weights"] = "other.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    check_equal(folder)


def test_an_older_file_that_transformers_prefers_to_newer_shards_is_refused(folder: Path) -> None:
    older = load_file(folder / WEIGHTS)
    shard(folder, 2.0)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name = "model.embed_tokens.weight"
    assert torch.equal(theirs.state_dict()[name], older[name])
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} and model-00001-of-00002.safetensors"):
        our_model(folder)
