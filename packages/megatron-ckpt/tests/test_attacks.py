"""Malicious checkpoints and Hugging Face folders, which must not cause reads, writes or waits."""

import json
import os
import re
import shutil

import pytest
import torch
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    View,
    export_hf,
    find_checkpoint,
    import_hf,
    paths,
)
from megatron_ckpt.cli import main
from megatron_ckpt.store import manifest
from megatron_ckpt.store.blocks import digest

pytestmark = pytest.mark.usefixtures("toy", "no_hang")

SECRET = b"from elsewhere"


@pytest.fixture
def run(folder, tmp_path):
    import_hf(folder, tmp_path / "run")
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "run"


def refused_by_every_reader(run, capsys, words):
    """Checks that each reader ends with one line that has ``words`` and writes no file."""
    made = run / "iter_0000000"
    before = sorted(run.parent.rglob("*"))
    for command in (["inspect"], ["verify"], ["convert", "--to-hf"]):
        target = [str(run.parent / "back")] if "--to-hf" in command else []
        assert main([*command, str(made), *target]) == 1
        error = capsys.readouterr().err
        assert error.startswith("megatron-ckpt: error: ") and words in error
        assert error.count("\n") == 1
    with pytest.raises(CheckpointError, match=re.escape(words)):
        view = View.whole(torch.empty(5, 2))
        CheckpointStore(run).load(0, {"word": [view]}, groups=[])
    assert sorted(run.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "name",
    ["/{0}/out", "tokenizer/{0}/out", "tokenizer/../../../out", "tokenizer/./out", "a\\b", ""],
)
def test_a_manifest_names_files_of_its_own_folder_only(run, forge, capsys, tmp_path, name):
    name = name.format(tmp_path)  # tokenizer//abs/path: absolute when joined to a folder

    def add(content):
        content["files"][name] = {"size": len(SECRET), "blocks": [digest(SECRET)]}

    outside = tmp_path / "out"
    outside.write_bytes(SECRET)  # the target of the name exists with its size
    forge(run / "iter_0000000", add)
    refused_by_every_reader(run, capsys, "is not a valid file name")


@pytest.mark.parametrize("file", ["../../secret", "state.json/../../../secret", "other", 3])
def test_a_piece_lies_in_a_file_of_the_manifest(run, forge, capsys, file):
    def move(content):
        content["tensors"]["word"]["pieces"][0] |= {"file": file, "start": 0}

    forge(run / "iter_0000000", move)
    refused_by_every_reader(run, capsys, "tensors 'word': pieces[0]: file is ")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "\ud800", {"\ud800": 1}], ids=ascii)
def test_manifests_with_nan_or_surrogates_are_refused(run, forge, value):
    forge(
        run / "iter_0000000",
        lambda content: content.update(model={"family": None, "config": {"x": value}}),
    )
    with pytest.raises(CheckpointError, match="has NaN or an unpaired surrogate"):
        _ = find_checkpoint(run).digest


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "MANIFEST.json", "tokenizer"])
def test_links_out_of_a_checkpoint_are_not_followed(run, capsys, tmp_path, name):
    path = run / "iter_0000000" / name
    shutil.move(path, tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    refused_by_every_reader(run, capsys, "outside the folder")


def test_a_link_that_replaces_a_checked_file_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    locate = paths.locate

    def swapped(folder, name):
        real = locate(folder, name)
        real.unlink()
        real.symlink_to(tmp_path / "secret")
        return real

    monkeypatch.setattr(paths, "locate", swapped)
    with pytest.raises(OSError, match="symbolic links"):
        paths.read_bytes(tmp_path / "folder", "file")


def test_links_inside_a_checkpoint_and_to_it_are_followed(run, tmp_path):
    file = run / "iter_0000000" / "tokenizer" / "tokenizer.json"
    file.rename(file.with_name("real.json"))
    file.symlink_to("real.json")
    (tmp_path / "link").symlink_to(run)
    assert find_checkpoint(tmp_path / "link").verify() == []


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "MANIFEST.json"])
def test_a_pipe_in_a_checkpoint_is_refused_without_waiting(run, forge, capsys, name):
    made = run / "iter_0000000"
    if name != "MANIFEST.json":
        forge(made, lambda content: content["files"].update({name: {"size": 0, "blocks": []}}))
    (made / name).unlink()
    os.mkfifo(made / name)
    refused_by_every_reader(run, capsys, f"{made / name} is a pipe, not a regular file")


def test_verify_names_a_pipe_that_replaces_a_file(run):
    checkpoint = Checkpoint(run / "iter_0000000")
    path = checkpoint.path / "tokenizer" / "tokenizer.json"
    path.unlink()
    os.mkfifo(path)
    assert checkpoint.verify() == [f"{path} is a pipe, not a regular file"]


@pytest.mark.parametrize(
    "file",
    [
        *("config.json", "model.safetensors", "extra.safetensors", "x.pth", "x.pt", "x.bin"),
        "model.safetensors.index.json",
    ],
)
def test_an_export_takes_no_weights_or_settings_from_the_tokenizer(folder, tmp_path, file):
    import_hf(folder, tmp_path / "run")
    checkpoint = Checkpoint(tmp_path / "run" / "iter_0000000")
    values = {"word": [View.whole(checkpoint.read_tensor("word"))]}
    values |= {n: [View.whole(checkpoint.read_tensor(n))] for n in ("layers.0.w", "layers.1.w")}
    CheckpointStore(tmp_path / "other").save(
        1, values, model=checkpoint.model, files={f"tokenizer/{file}": b"{}"}
    )
    with pytest.raises(CheckpointError, match=f"tokenizer/{file}' has the name of another"):
        export_hf(tmp_path / "other", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_links_out_of_a_hugging_face_folder_are_not_followed(folder, tmp_path, capsys, name):
    shutil.move(folder / name, tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert f"{folder / name} is a link to {tmp_path / 'secret'}, outside the folder" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_pipe_in_a_hugging_face_folder_is_refused(folder, tmp_path, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe, not a regular file"):
        import_hf(folder, tmp_path / "run")


@pytest.mark.parametrize("file", ["../other.safetensors", "/{0}/other.safetensors", 7, None])
def test_an_index_names_files_of_its_own_folder_only(folder, tmp_path, file):
    file = file.format(tmp_path) if isinstance(file, str) else file
    shutil.move(folder / "model.safetensors", tmp_path / "other.safetensors")
    index = {"weight_map": {"net.word": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"index.json: weight_map: .* is not a valid file name"
    ):
        import_hf(folder, tmp_path / "run")


def test_links_in_the_hugging_face_cache_are_followed(folder, tmp_path):
    snapshot = tmp_path / "models--toy" / "snapshots" / "0a1b"
    blobs = tmp_path / "models--toy" / "blobs"
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    made = import_hf(snapshot, tmp_path / "run")
    assert (made / "tokenizer" / "tokenizer.json").read_text() == "{}"
    (blobs / "tokenizer.json").unlink()
    (blobs / "tokenizer.json").symlink_to(tmp_path / "theirs" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="outside the folder"):
        import_hf(snapshot, tmp_path / "again")


def test_links_out_of_an_attached_folder_are_refused(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="outside the folder"):
        CheckpointStore(tmp_path / "run").save(1, {}, files={"tokenizer": tmp_path / "tokenizer"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": -1}, r"pieces\[0\]: start is -1, not an integer of at least 0"),
        ({"start": 10**9}, "start is 1000000000, past the end of"),
        ({"start": 0.5}, "start is 0.5, not an integer"),
        ({"offsets": [0, 1]}, "outside of shape"),
        ({"lengths": [10**12, 2]}, "outside of shape"),
        ({"lengths": [5]}, "for a tensor of shape"),
        ({"lengths": [4, 2]}, "pieces have 8 elements"),
        ({"offsets": None}, "offsets is None, not a list of non-negative integers"),
    ],
)
def test_numbers_of_a_piece_are_checked_before_they_are_used(run, forge, change, words):
    made = run / "iter_0000000"
    forge(made, lambda content: content["tensors"]["word"]["pieces"][0].update(change))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(made)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["tensors"]["word"].update(shape=[10**10, 10**9]), "too large for a tensor"),
        (lambda c: c["tensors"]["word"].update(shape=[10**6, 10**6]), "pieces have 10 elements"),
        (lambda c: c["tensors"]["word"].update(dtype="F4"), "dtype is 'F4', not a dtype"),
        (lambda c: c["files"]["state.json"].update(size=10**12), r"which is not 1 blocks"),
        (lambda c: c["files"]["state.json"].update(blocks=[]), r"which is not 0 blocks"),
        (
            lambda c: c["tensors"].update({str(i): c["tensors"]["word"] for i in range(99)}),
            "pieces take",
        ),
        (lambda c: c.update(iteration=True), "iteration is True, not an integer"),
        (lambda c: c.update(iteration=-1), "iteration is -1, not an integer of at least 0"),
        (lambda c: c.update(world_size=0), "world_size is 0, not an integer of at least 1"),
        (lambda c: c.update(model={"family": 3, "config": {}}), "model: family is 3, not a string"),
        (lambda c: c.pop("files"), "lacks 'files'"),
    ],
)
def test_numbers_of_a_manifest_are_checked_against_each_other(run, forge, change, words):
    made = run / "iter_0000000"
    forge(made, change)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(made)


@pytest.mark.parametrize(
    ("shape", "words"),
    [  # of 4 bytes an element; a tensor may have 2**62
        ([1 << 60, 1], r"lengths is \[5, 2\], from \(0, 0\), outside of shape"),
        ([(1 << 60) + 1, 1], "which is too large for a tensor"),
        ([0, (1 << 60) + 1], "which is too large for a tensor"),  # although it has no element
    ],
)
def test_tensors_have_at_most_two_to_the_62_bytes(run, forge, shape, words):
    made = run / "iter_0000000"
    forge(made, lambda content: content["tensors"]["word"].update(shape=shape))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(made)


def cut_word(content, boxes):
    """Replaces the piece of a tensor of shape [5, 2] by those of boxes."""
    (piece,) = content["tensors"]["word"]["pieces"]
    content["tensors"]["word"]["pieces"] = [
        {**piece, "offsets": [*offsets], "lengths": [*lengths]} for offsets, lengths in boxes
    ]


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 0), (3, 2)), ((0, 0), (2, 2))], "but two of its pieces overlap"),
        ([((0, 0), (4, 1)), ((2, 0), (3, 2))], "but two of its pieces overlap"),
        ([((0, 0), (5, 1)), ((0, 1), (2, 1)), ((2, 1), (3, 1))], ""),
        ([((0, 0), (5, 2)), ((3, 0), (0, 2))], ""),  # an empty one overlaps none
    ],
)
def test_pieces_that_overlap_are_refused_since_they_leave_a_gap(run, forge, boxes, words):
    made = run / "iter_0000000"
    forge(made, lambda content: cut_word(content, boxes))
    if words:
        with pytest.raises(CheckpointError, match=f"shape is .*{words}"):
            Checkpoint(made)
    else:
        assert len(Checkpoint(made).tensors["word"].pieces) == len(boxes)


def test_a_tensor_is_cut_along_at_most_eight_dims(run, forge, monkeypatch):
    made = run / "iter_0000000"
    parts = [((0, 0), (5, 1)), ((0, 1), (2, 1)), ((2, 1), (3, 1))]
    forge(made, lambda content: cut_word(content, parts))
    assert manifest.MOST_CUT_DIMS == 8
    monkeypatch.setattr(manifest, "MOST_CUT_DIMS", 1)
    with pytest.raises(CheckpointError, match="and is cut along 2 dims; at most 1 can be"):
        Checkpoint(made)


@pytest.mark.parametrize(("length", "shown"), [(39, "x" * 39), (40, r"'x{12}\.\.\.x{13}'")])
def test_a_format_of_forty_letters_is_shortened_in_its_error(run, forge, length, shown):
    forge(run / "iter_0000000", lambda content: content.update(format="x" * length))
    with pytest.raises(CheckpointError, match=rf"has format {shown} 1, but this megatron-ckpt"):
        Checkpoint(run / "iter_0000000")


def test_layers_are_counted_against_the_tensors(folder, run, forge, tmp_path):
    words = "the configuration has 1000000000 layers, but the source has only "
    forge(run / "iter_0000000", lambda c: c["model"]["config"].update(num_layers=10**9))
    with pytest.raises(CheckpointError, match=words + "3 tensors"):
        export_hf(run, tmp_path / "back")
    config = json.loads((folder / "config.json").read_text()) | {"depth": 10**9}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words + "5 tensors"):
        import_hf(folder, tmp_path / "again")
