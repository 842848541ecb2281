"""Tensors that no row uses are ignored only if they are redundant."""

import pytest
import torch
from megatron_ckpt import Checkpoint, CheckpointError, import_hf
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("toy")
TURNS = 100.0 ** -(torch.arange(0, 8, 2).double() / 8)
MASK = torch.ones(4, 4).tril()


@pytest.fixture
def with_tensor(folder):
    def add(name, tensor):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensor(tensors) if callable(tensor) else tensor
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return add


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("old.0", MASK.bool().view(1, 1, 4, 4)),
        ("old.1", MASK.byte()),
        ("low", torch.tensor(-1e4)),
        ("low", torch.tensor([-1e9])),
        ("turns", TURNS.float()),
        ("turns", TURNS.bfloat16()),
        ("head", lambda held: held["net.word"].clone()),
        ("head", lambda held: torch.cat([held["net.word"], torch.ones(3, 2)])),  # padded
    ],
)
def test_redundant_tensors_are_ignored(with_tensor, tmp_path, name, tensor):
    made = Checkpoint(import_hf(with_tensor(name, tensor), tmp_path / "run"))
    assert sorted(made.tensors) == ["layers.0.w", "layers.1.w", "word"]


def changed(held):
    head = held["net.word"].clone()
    head[-1, -1] += 1e-6
    return head


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("head", changed, "tensor 'head' differs from 'net.word', but the configuration ties"),
        ("head", lambda held: held["net.word"][:4].clone(), "differs from 'net.word'"),
        ("head", lambda held: held["net.word"].bfloat16(), "differs from 'net.word'"),
        ("old.0", MASK.clone().fill_diagonal_(0), "'old.0' is not a causal mask"),
        ("old.0", torch.ones(4, 4), "'old.0' is not a causal mask"),
        ("old.0", torch.ones(3), "'old.0' is not a causal mask"),
        ("low", torch.tensor(-1.0), "'low' must be one number of at most -10000"),
        ("low", torch.tensor([-1e4, 3.0]), "'low' must be one number"),
        ("low", torch.tensor(float("nan")), "'low' must be one number"),
        ("turns", TURNS.float() * 1.001, "'turns' differs from the rotary frequencies"),
        ("turns", TURNS[:3].float(), "'turns' differs from the rotary frequencies"),
    ],
)
def test_tensors_that_are_not_redundant_are_refused(with_tensor, tmp_path, name, tensor, words):
    with pytest.raises(CheckpointError, match=words):
        import_hf(with_tensor(name, tensor), tmp_path / "run")
    assert not (tmp_path / "run").exists()
