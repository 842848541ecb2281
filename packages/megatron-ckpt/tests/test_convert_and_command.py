"""Conversion with a made-up family, and the command. Real families are tested with transformers."""

import fcntl
import json
import os
import subprocess
import sys
import weakref
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    ModelRecord,
    View,
    export_hf,
    import_hf,
)
from megatron_ckpt.cli import main
from megatron_ckpt.store import durable
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("toy")
TOY_FIELDS = {"num_layers": 2, "vocab": 5, "base": 100.0, "dim": 8}


def test_import_and_export_round_trip(folder, tmp_path):
    checkpoint = Checkpoint(import_hf(folder, tmp_path / "run", iteration=4))
    assert checkpoint.iteration == 4 and checkpoint.model.family == "toy"
    assert checkpoint.model.config == {"num_layers": 2, "vocab": 5, "base": 100.0, "dim": 8}
    back = export_hf(tmp_path / "run", tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((back / "config.json").read_text()) == {
        "architectures": ["ToyModel"],
        "depth": 2,
        "eos": 3,
        "torch_dtype": "float32",
    }


def test_every_file_of_chat_templates_is_kept_by_import_and_export(folder, tmp_path):
    files = {
        "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "a"}]}',
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "b",
        "chat_template.json": '{"chat_template": "c"}',
        "additional_chat_templates/tool_use.jinja": "d",
        "additional_chat_templates/rag.jinja": "e",
    }
    (folder / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "additional_chat_templates/notes.txt").write_text("no template")
    import_hf(folder, tmp_path / "run")
    back = export_hf(tmp_path / "run", tmp_path / "back")
    assert {name: (back / name).read_text() for name in files} == files
    assert not (back / "additional_chat_templates/notes.txt").exists()


def test_an_export_aligns_tensors_of_small_and_large_elements(folder, tmp_path):
    small = {f"net.0.{part}" for part in "ab"}  # an odd number of elements, before larger ones
    tensors = {
        name: tensor[:, :1].contiguous().to(torch.bfloat16) if name in small else tensor.double()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "back")
    data = (tmp_path / "back" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    assert {row["dtype"] for row in header.values()} == {"BF16", "F64"}
    for row in header.values():
        size = {"BF16": 2, "F64": 8}[row["dtype"]]
        assert (8 + length + row["data_offsets"][0]) % size == 0


def test_rows_are_read_one_at_a_time(folder, tmp_path, monkeypatch):
    from megatron_ckpt.formats.huggingface import SafetensorsFolder
    from megatron_ckpt.store.checkpoint import CheckpointTensors

    read, alive = [], []

    def watch(kind):
        original = kind.__getitem__

        def getitem(self, name):
            alive.append((name, sum(reference() is not None for reference in read)))
            tensor = original(self, name)
            read.append(weakref.ref(tensor.untyped_storage()))
            return tensor

        monkeypatch.setattr(kind, "__getitem__", getitem)

    watch(SafetensorsFolder)
    import_hf(folder, tmp_path / "run")
    assert sorted(alive) == [
        ("net.0.a", 0),
        ("net.0.b", 1),
        ("net.1.a", 0),
        ("net.1.b", 1),
        ("net.word", 0),
    ]
    watch(CheckpointTensors)
    alive.clear()
    export_hf(tmp_path / "run", tmp_path / "back")
    assert sorted(alive) == [("layers.0.w", 0), ("layers.1.w", 0), ("word", 0)]


def test_an_export_retries_if_its_folder_is_removed_before_it_is_locked(tmp_path, monkeypatch):
    lock, losses = durable._lock_folder, []

    def late(folder):
        held = lock(folder)
        if len(losses) < 2:  # the other export held the lock and removed the folder
            losses.append(folder)
            folder.rmdir()
            if len(losses) == 1:
                os.close(held)
                return None
        return held

    monkeypatch.setattr(durable, "_lock_folder", late)
    with durable.create_folder(tmp_path / "back") as folder:
        (folder / "file").touch()
        assert folder not in losses and lock(folder) is None
    assert [path.name for path in tmp_path.iterdir()] == ["back"]

    monkeypatch.setattr(durable, "_lock_folder", lambda folder: None)  # a file system without locks
    with durable.create_folder(tmp_path / "more"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "more"]


def test_an_export_removes_only_the_remains_of_a_killed_one(folder, tmp_path):
    import_hf(folder, tmp_path / "run")
    dead, living = "back.tmp-00112233aabb", "back.tmp-00112233aabc"
    for name in (dead, living, "back.tmp-mine", f"other{dead}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    held = os.open(tmp_path / living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # like a running export
    export_hf(tmp_path / "run", tmp_path / "back")
    left = sorted(path.name for path in tmp_path.glob("*.tmp-*"))
    assert left == [living, "back.tmp-mine", f"other{dead}"]
    os.close(held)


def test_a_failed_export_leaves_no_folder(folder, tmp_path, disk):
    import_hf(folder, tmp_path / "run")
    with disk(3, full=True).installed(), pytest.raises(OSError, match="No space left"):
        export_hf(tmp_path / "run", tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "theirs"]
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "precious").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export_hf(tmp_path / "run", tmp_path / "back")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "a config.json without architectures"),
        (
            lambda f: (f / "config.json").write_text('{"architectures": ["A", "B"]}'),
            "^no family reads A or B; installed are toy$",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "cannot be read"),
    ],
)
def test_folders_without_a_model_are_refused_with_the_file(folder, tmp_path, damage, words):
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        import_hf(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_any_family_the_package_to_install_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: [])
    with pytest.raises(CheckpointError, match="no family is installed; install megatron-models"):
        import_hf(folder, tmp_path / "run")


def test_inspect_wraps_settings_and_leaves_out_those_that_are_not_set(
    folder, tmp_path, capsys, monkeypatch
):
    config = TOY_FIELDS | {"first_unset": 0, "second_unset": "none", "text_with_words": "a b c d"}
    CheckpointStore(tmp_path / "run").save(
        0, {"steps": 7}, model=ModelRecord("toys", "toy", 3, config)
    )
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    indent = " " * 12
    assert f"{indent}num_layers 2, vocab 5,\n{indent}base 100.0, dim 8,\n" in out
    assert f"{indent}text_with_words a b c d\n" in out
    assert "and 2 that are 0, False, none or empty" in out and "unset" not in out
    assert main(["inspect", str(tmp_path / "run"), "--all"]) == 0
    assert "first_unset 0" in capsys.readouterr().out


def test_the_command_converts_inspects_and_verifies(folder, tmp_path, capsys):
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    assert main(["convert", "--from-hf", str(folder), run, "--dtype", "bfloat16"]) == 0
    made = capsys.readouterr().out.strip()
    assert made == f"{run}/iter_0000000"
    assert main(["inspect", run]) == 0
    out = capsys.readouterr().out
    assert (
        "iteration   0" in out
        and "model       toys, family toy, configuration of version 3" in out
        and "num_layers 2" in out
    )
    assert "model: 3 tensors, 34 elements, 68 B" in out
    assert "  layers.{i}.w  BF16  6x2                2 x 24 B" in out
    assert main(["inspect", made, "--all"]) == 0
    assert "  layers.1.w  BF16  6x2" in capsys.readouterr().out
    assert main(["verify", run]) == 0
    shown = capsys.readouterr()
    assert "all digests match" in shown.out and shown.err == ""
    assert main(["convert", "--to-hf", run, back, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.strip() == back
    assert load_file(tmp_path / "back" / "model.safetensors")["net.word"].dtype == torch.float32


def test_the_command_detects_the_direction(folder, tmp_path, capsys):
    run, back = tmp_path / "run", tmp_path / "back"
    assert main(["convert", str(folder), str(run)]) == 0
    assert main(["convert", str(run), str(back)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{run}/iter_0000000", str(back)]
    assert (back / "model.safetensors").exists()


def test_the_command_names_damage_and_exits_with_1(folder, tmp_path, capsys):
    made = import_hf(folder, tmp_path / "run")
    file = made / "tokenizer" / "tokenizer.json"
    file.write_text("[]")
    assert main(["verify", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"megatron-ckpt: error: {file}: bytes 0 to 2 changed")
    file.unlink()
    for command in ("inspect", "verify"):
        assert main([command, str(made)]) == 1
        error = capsys.readouterr().err
        assert error == (
            f"megatron-ckpt: error: {made} is torn: tokenizer/tokenizer.json is missing\n"
        )
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspct", "x"], "did you mean inspect?"),
        (["inspect", "x", "--iteratoin", "3"], "did you mean --iteration?"),
        (["convert", "--to-hf", "x", "y", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        ([], "required: COMMAND"),
    ],
)
def test_misspelt_words_name_the_nearest_and_exit_with_2(capsys, arguments, words):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_help_listing_and_verifying_do_not_import_torch(folder, tmp_path):
    made = import_hf(folder, tmp_path / "run")
    script = (
        "import sys; from megatron_ckpt.cli import main\n"
        f"main(['inspect', {str(made)!r}]); main(['verify', {str(made)!r}])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_record_without_kind_and_version_is_gpt_version_0(folder, tmp_path, forge):
    made = import_hf(folder, tmp_path / "run")
    assert Checkpoint(made).model == ModelRecord("toys", "toy", 3, TOY_FIELDS)

    def age(content):
        del content["model"]["kind"], content["model"]["version"]

    forge(made, age)
    old = Checkpoint(made)
    assert old.model == ModelRecord("gpt", "toy", 0, TOY_FIELDS)
    assert old.verify() == []
    with pytest.raises(CheckpointError, match=r"kind 'gpt', but family 'toy' describes .* 'toys'"):
        export_hf(made, tmp_path / "back")


def save_toy(path, **changes):
    record = ModelRecord("toys", None, 3, TOY_FIELDS | {"num_layers": 0, **changes})
    tensors = {"word": [View.whole(torch.ones(5, 2))]}
    return CheckpointStore(path).save(1, tensors, model=record)


def test_a_model_without_family_is_exported_as_the_only_one_that_fits(
    toy, tmp_path, capsys, monkeypatch
):
    made, back = save_toy(tmp_path / "run"), tmp_path / "back"
    assert main(["convert", "--to-hf", str(made), str(back)]) == 0
    note = f"megatron-ckpt: note: {made} names no family; toy is the only one that fits\n"
    assert capsys.readouterr().err == note
    assert json.loads((back / "config.json").read_text())["architectures"] == ["ToyModel"]

    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: twice(toy))
    assert main(["convert", "--to-hf", str(made), str(tmp_path / "two")]) == 1
    words = "the families toy, twin can all express the model; choose one with --family\n"
    assert capsys.readouterr().err == f"megatron-ckpt: error: {made}: {words}"
    assert main(["convert", "--to-hf", str(made), str(tmp_path / "two"), "--family", "twin"]) == 0
    assert capsys.readouterr().err == ""  # the user has chosen

    strange = save_toy(tmp_path / "strange", dim=9)
    with pytest.raises(CheckpointError, match="express the model: toy has dim = 8, this one has 9"):
        export_hf(strange, tmp_path / "three")
    toy.kind = "others"
    with pytest.raises(CheckpointError, match="describes models of kind 'toys'; installed are toy"):
        export_hf(made, tmp_path / "three")


def test_a_model_without_family_is_exported_as_the_one_that_others_defer_to(
    toy, tmp_path, capsys, monkeypatch
):
    twin = SimpleNamespace(**vars(toy) | {"name": "twin", "defers_to": ("toy",)})
    entries = [SimpleNamespace(name="twin", load=lambda: twin), twice(toy)[0]]
    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: entries)
    made = save_toy(tmp_path / "run")
    assert main(["convert", "--to-hf", str(made), str(tmp_path / "back")]) == 0
    assert capsys.readouterr().err.endswith("toy is the only one that fits\n")


def test_the_three_nearest_families_name_what_they_cannot_express(toy, tmp_path, monkeypatch):
    lacking = {"a": ["1", "2", "3"], "b": ["4"], "c": ["5", "6"], "d": ["7", "8", "9", "10"]}
    entries = []
    for name, differences in lacking.items():
        family = SimpleNamespace(**vars(toy) | {"name": name})
        family.differences = lambda config, found=differences: found
        entries.append(SimpleNamespace(name=name, load=lambda family=family: family))
    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: entries)
    with pytest.raises(CheckpointError) as caught:
        export_hf(save_toy(tmp_path / "run"), tmp_path / "back")
    words = "express the model: b has 4; c has 5 and 1 more; a has 1 and 2 more"
    assert str(caught.value).endswith(words)


def test_an_architecture_of_two_families_needs_a_choice(toy, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_ckpt.families.entry_points", lambda group: twice(toy))
    line = ["convert", "--from-hf", str(folder), str(tmp_path / "one")]
    assert main(line) == 1
    words = "the families toy, twin all read ToyModel; choose one with --family\n"
    assert capsys.readouterr().err.endswith(words)
    assert not (tmp_path / "one").exists()
    assert main([*line, "--family", "tiwn"]) == 1
    words = "error: no family 'tiwn' (nearest: 'twin'); installed are toy, twin\n"
    assert capsys.readouterr().err.endswith(words)
    assert main([*line, "--family", "twin"]) == 0


def twice(toy):
    entry = EntryPoint("toy", "toy_family:FAMILY", "megatron.families")
    return [entry, EntryPoint("twin", "toy_family:FAMILY", "megatron.families")]
