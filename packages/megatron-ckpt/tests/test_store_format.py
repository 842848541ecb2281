"""The manifest as it is documented, and its numbers just within and just out of range."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    ModelRecord,
    View,
)
from megatron_ckpt.store import directory
from megatron_ckpt.store import manifest as manifest_module
from megatron_ckpt.store.blocks import FileRecord
from megatron_ckpt.store.manifest import Manifest, Piece, TensorRecord

from .test_store_limits import save

ZEROS = b"0" * 32


def test_a_manifest_is_written_as_documented(tmp_path):
    """A digest that other values contain is not replaced by that of the manifest."""
    model = ModelRecord("gpt", None, 2, {"zeros": ZEROS.decode(), "name": "\u00e4"})
    path = CheckpointStore(tmp_path).save(3, {"w": [View.whole(torch.ones(2))]}, model=model)
    data = (path / "MANIFEST.json").read_bytes()
    content, checkpoint = json.loads(data), Checkpoint(path)
    known = {
        "format": "megatron-ckpt",
        "format_version": 1,
        "algorithm": "xxh3_128",
        "block_size": 64 * 1024**2,
        "iteration": 3,
        "world_size": 1,
    }
    assert {key: content[key] for key in known} == known
    blank = data.replace(content["digest"].encode(), ZEROS)
    assert xxhash.xxh3_128_hexdigest(blank) == content["digest"] == checkpoint.digest
    assert checkpoint.model == model
    assert "\u00e4".encode() in data  # as UTF-8, without escapes
    assert not any(line.startswith(b" ") for line in data.split(b"\n"))  # no indentation


def parsed(size, *tensors, shape=(10,)):
    """Returns the manifest of one file, read from its bytes; each tensor is given as its pieces."""
    records = {
        str(number): TensorRecord("F32", shape, "model", tuple(pieces))
        for number, pieces in enumerate(tensors)
    }
    made = Manifest(1, 1, {"file": FileRecord(size, ("0" * 32,))}, records)
    return Manifest.from_bytes(made.to_bytes(), Path("manifest"))


def test_pieces_may_fill_their_file_and_no_more():
    first, second = [Piece("file", 0, (0,), (10,))], [Piece("file", 40, (0,), (10,))]
    assert parsed(80, first, second).tensors["1"].pieces == tuple(second)
    with pytest.raises(CorruptCheckpointError, match=r"40, past the end of file, .* has 79 bytes"):
        parsed(79, first, second)
    with pytest.raises(CorruptCheckpointError, match="pieces take 80 bytes of file, which has 79"):
        parsed(79, first, first)


def test_as_many_dims_may_be_cut_as_the_limit(monkeypatch):
    halves = [Piece("file", 0, (0,), (4,)), Piece("file", 16, (4,), (6,))]
    monkeypatch.setattr(manifest_module, "MOST_CUT_DIMS", 1)
    assert parsed(40, halves).tensors["0"].pieces == tuple(halves)
    monkeypatch.setattr(manifest_module, "MOST_CUT_DIMS", 0)
    with pytest.raises(CorruptCheckpointError, match="is cut along 1 dims; at most 0 can be"):
        parsed(40, halves)


def test_a_configuration_that_cannot_be_written_again_is_damage(monkeypatch):
    """How many levels can be read but not written differs between versions of Python."""
    data = Manifest(1, 1, {}, {}).to_bytes()

    def too_deep(self):
        raise RecursionError

    monkeypatch.setattr(Manifest, "_blank", too_deep)
    with pytest.raises(
        CorruptCheckpointError, match=r"^manifest is damaged: .* nested too deeply$"
    ):
        Manifest.from_bytes(data, Path("manifest"))


def test_a_file_in_the_place_of_a_folder_is_torn(tmp_path):
    path = save(tmp_path / "run", files={"deep/notes": b"1"})
    shutil.rmtree(path / "deep")
    (path / "deep").touch()
    with pytest.raises(CorruptCheckpointError, match="is torn: deep/notes is missing"):
        Checkpoint(path)
    (tmp_path / "file").touch()
    with pytest.raises(CorruptCheckpointError, match=r"file is torn: it has no MANIFEST\.json"):
        Checkpoint(tmp_path / "file")


def test_a_checkpoint_that_the_system_does_not_read_is_skipped(tmp_path, monkeypatch, caplog):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    read = directory.read_bytes

    def refuse(path, name):
        if path.name == "iter_0000002":
            raise PermissionError(errno.EACCES, "Permission denied", str(path / name))
        return read(path, name)

    monkeypatch.setattr(directory, "read_bytes", refuse)
    assert CheckpointStore(tmp_path).latest_iteration() == 1
    assert "Permission denied" in caplog.text


def test_a_load_warns_of_each_problem_once(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)

    def loaded():
        into = {name: [View.whole(torch.zeros(2, 3))] for name in ("w", "w.exp_avg")}
        return store.load(None, into).iteration

    assert loaded() == 3 and caplog.messages == []
    (store.path(3) / "MANIFEST.json").unlink()
    file = store.path(2) / "model-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert loaded() == 1
    torn, damaged = caplog.messages
    assert "iter_0000003 is torn" in torn and torn.endswith("; using iteration 2")
    assert "iter_0000002 is damaged and skipped" in damaged


def test_a_tensor_that_the_model_lacks_has_a_remedy(tmp_path):
    save(tmp_path)
    with pytest.raises(CheckpointError, match="load the same model, or choose the groups to load"):
        CheckpointStore(tmp_path).load(1, {})
    CheckpointStore(tmp_path).save(2, {n: [View.whole(torch.ones(1))] for n in ("a.weight", "a.b")})
    into = {"a.weight": [View.whole(torch.zeros(1))]}
    with pytest.raises(CheckpointError, match=r"merge it into the weight first \(megatron-train "):
        CheckpointStore(tmp_path).load(2, into)
