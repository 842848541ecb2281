"""Which files of a folder are read, and which folders are refused."""

import json

import pytest
import torch
from megatron_ckpt import CheckpointError, ForeignModel, export_hf, import_hf
from megatron_ckpt.cli import main
from megatron_ckpt.formats.weight_files import INDEX, WEIGHTS, find_weight_files
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("toy")


def shard(folder, scale=1.0, names=("a.safetensors", "b.safetensors")):
    """Writes the weights of a folder, multiplied, as two shards and an index."""
    weights = {name: tensor * scale for name, tensor in load_file(folder / WEIGHTS).items()}
    parts = [dict(list(weights.items())[::2]), dict(list(weights.items())[1::2])]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    files = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def sum_of(folder):
    model = ForeignModel(folder)
    return sum(float(model.read_tensor(name).double().sum()) for name in model.tensors)


def test_one_file_is_read_beside_an_index_of_missing_files(folder, tmp_path, capsys):
    expected = sum_of(folder)
    shard(folder, 2.0)
    (folder / "b.safetensors").unlink()
    assert sum_of(folder) == expected
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert f"{INDEX} names b.safetensors, which is missing; {WEIGHTS} is read" in said


def test_one_file_and_shards_with_the_same_tensors_are_one_model(folder):
    expected = sum_of(folder)
    shard(folder)
    assert sum_of(folder) == expected
    (folder / WEIGHTS).unlink()
    assert sum_of(folder) == expected


def test_an_older_file_beside_newer_shards_is_refused_with_both_names(folder, tmp_path):
    shard(folder, 2.0)
    pattern = rf"two models, {WEIGHTS} and a.safetensors, b.safetensors of .* differ in 'net"
    with pytest.raises(CheckpointError, match=pattern):
        import_hf(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tensor_that_one_of_two_models_lacks_is_a_difference(folder):
    shard(folder)
    weights = load_file(folder / "b.safetensors")
    save_file(weights | {"extra": torch.ones(2)}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match="differ in 'extra'; remove one"):
        find_weight_files(folder, {})


def test_a_tensor_in_two_shards_is_refused_unless_both_are_equal(folder):
    expected = sum_of(folder)
    shard(folder)
    (folder / WEIGHTS).unlink()
    one, other = load_file(folder / "a.safetensors"), load_file(folder / "b.safetensors")
    name = next(iter(one))
    save_file(other | {name: one[name]}, folder / "b.safetensors")
    assert sum_of(folder) == expected
    save_file(other | {name: one[name] + 1}, folder / "b.safetensors")
    with pytest.raises(
        CheckpointError, match=f"different tensors {name} in a.safetensors and b.safetensors"
    ):
        ForeignModel(folder)


def test_the_configuration_may_name_the_file(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor * 2 for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / "other.safetensors")
    expected = 2 * sum_of(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    assert sum_of(folder) == expected
    back = export_hf(import_hf(folder, tmp_path / "run"), tmp_path / "back")
    assert "transformers_weights" not in json.loads((back / "config.json").read_text())
    assert sum_of(back) == expected
    shard(folder, 4.0)
    path.write_text(json.dumps(config | {"transformers_weights": INDEX}))
    assert sum_of(folder) == 2 * expected
    for wrong in ("../other.safetensors", "weights.bin", 7):
        path.write_text(json.dumps(config | {"transformers_weights": wrong}))
        with pytest.raises(CheckpointError, match="transformers_weights"):
            ForeignModel(folder)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model.fp16.safetensors", "name the file in transformers_weights of config.json"),
        ("consolidated.safetensors", "name the file in transformers_weights of config.json"),
        ("pytorch_model.bin", "save the model with safetensors"),
    ],
)
def test_files_with_other_names_are_named(folder, name, remedy):
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(CheckpointError, match=f"neither {WEIGHTS} nor {INDEX}, only {name}; ") as e:
        ForeignModel(folder)
    assert remedy in str(e.value)


def test_an_export_never_joins_older_weights(folder, tmp_path):
    run, target = import_hf(folder, tmp_path / "run"), tmp_path / "back"
    target.mkdir()
    for name in (WEIGHTS, INDEX, "pytorch_model.bin", "generation_config.json"):
        (target / name).write_text("{}")
        with pytest.raises(CheckpointError, match="back exists and is not empty"):
            export_hf(run, target)
        (target / name).unlink()
    export_hf(run, target)
    assert sum_of(target) == sum_of(folder)
