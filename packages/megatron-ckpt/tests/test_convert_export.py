"""What an import or export tells and writes: sizes, files of weights, settings, and listings."""

import inspect
import json
import os

import pytest
import torch
import tqdm
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    ModelRecord,
    View,
    export_hf,
    import_hf,
)
from megatron_ckpt._version import __version__
from megatron_ckpt.cli import _size, build_parser, main
from megatron_ckpt.coordinator import map_reduce
from safetensors.torch import load_file, save_file

from .test_convert_and_command import TOY_FIELDS

pytestmark = pytest.mark.usefixtures("toy")
NAMES = ["net.0.a", "net.0.b", "net.1.a", "net.1.b", "net.word"]


@pytest.mark.parametrize(
    ("limit", "files"),
    [  # the tensors of a row are 40, 48 and 48 bytes, and stay together
        (136, [NAMES]),
        (135, [["net.0.a", "net.0.b", "net.word"], ["net.1.a", "net.1.b"]]),
        (88, [["net.0.a", "net.0.b", "net.word"], ["net.1.a", "net.1.b"]]),
        (87, [["net.word"], ["net.0.a", "net.0.b"], ["net.1.a", "net.1.b"]]),
        (1, [["net.word"], ["net.0.a", "net.0.b"], ["net.1.a", "net.1.b"]]),
    ],
)
def test_files_of_weights_are_filled_up_to_their_size(folder, tmp_path, limit, files):
    run = import_hf(folder, tmp_path / "run")
    started, written = [], []
    back = export_hf(
        run,
        tmp_path / "back",
        max_shard_bytes=limit,
        on_start=started.append,
        progress=written.append,
    )
    assert started == [(5, 136)] and sum(written) == 136 and len(written) == 5
    found = sorted(path.name for path in back.glob("*.safetensors*"))
    if len(files) == 1:
        assert found == ["model.safetensors"]
        return
    names = [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
    assert found == [*names, "model.safetensors.index.json"]
    for name, held in zip(names, files, strict=True):
        assert sorted(load_file(back / name)) == held
    index = json.loads((back / "model.safetensors.index.json").read_text())
    where = {key: name for name, held in zip(names, files, strict=True) for key in held}
    assert index == {"metadata": {"total_size": 136}, "weight_map": where}
    assert list(index["weight_map"]) == NAMES


def test_an_import_tells_the_bytes_that_it_writes_in_the_dtype(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    weights["net.word"] = torch.arange(10).view(5, 2)  # integers keep their dtype
    save_file(weights, folder / "model.safetensors")
    started, written = [], []
    run = import_hf(
        folder,
        tmp_path / "run",
        dtype=torch.float16,
        on_start=started.append,
        progress=written.append,
    )
    assert started == [(3, 80 + 2 * 24)] and sum(written) == 128
    made = Checkpoint(run)
    assert {n: r.dtype for n, r in made.tensors.items()} == {
        "word": "I64",
        "layers.0.w": "F16",
        "layers.1.w": "F16",
    }
    back = export_hf(made, tmp_path / "back", dtype=torch.float64)
    found = {name: tensor.dtype for name, tensor in load_file(back / "model.safetensors").items()}
    assert found == dict.fromkeys(NAMES[:4], torch.float64) | {"net.word": torch.int64}
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "float64"


def test_a_model_that_was_trained_here_has_the_tokens_of_its_tokenizer(tmp_path, toy):
    record = ModelRecord("toys", "toy", 3, TOY_FIELDS | {"num_layers": 0})
    tensors = {"word": [View.whole(torch.ones(5, 2))]}
    vocabulary = {"model": {"vocab": {"</s>": 2}}}
    files = {
        "tokenizer/tokenizer.json": json.dumps(vocabulary).encode(),
        "tokenizer/tokenizer_config.json": b'{"eos_token": "</s>"}',
        "huggingface/other.json": b"{}",
        "notes.txt": b"",
    }
    run = CheckpointStore(tmp_path / "run").save(1, tensors, model=record, files=files)
    back = export_hf(run, tmp_path / "back")
    assert json.loads((back / "generation_config.json").read_text()) == {"eos_token_id": 2}
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    settings = {"architectures": ["ToyModel"], "depth": 0, "torch_dtype": "float32"}
    text = (back / "config.json").read_text()
    assert json.loads(text) == tokens | settings
    assert text == json.dumps(json.loads(text), indent=2) + "\n"  # as transformers writes it
    assert sorted(path.name for path in back.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    # Settings of another class than the family's are not taken over.
    strange = {"huggingface/config.json": b'{"architectures": ["Other"], "x": 1}'}
    run = CheckpointStore(tmp_path / "other").save(1, tensors, model=record, files=strange)
    assert "x" not in json.loads((export_hf(run, tmp_path / "two") / "config.json").read_text())


def test_an_import_names_each_file_that_it_leaves_out(folder, tmp_path):
    notes = []
    import_hf(folder, tmp_path / "one", on_note=notes.append)
    assert notes == []
    (folder / "tekken.json").write_text("{}")
    weights = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "gone.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    import_hf(folder, tmp_path / "two", on_note=notes.append)
    absent, left = notes
    assert absent.endswith("names gone.safetensors, which is missing; model.safetensors is read")
    assert left == f"{folder}: not kept in the checkpoint: tekken.json"


def test_settings_of_generation_are_kept_unless_the_export_makes_its_own(folder, tmp_path):
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    back = export_hf(import_hf(folder, tmp_path / "run"), tmp_path / "back")
    assert (back / "generation_config.json").read_text() == '{"top_k": 3}'


def test_an_export_needs_a_free_place_and_a_record_of_the_model(folder, tmp_path):
    run = import_hf(folder, tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file exists and is not empty; use another folder"):
        export_hf(run, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert export_hf(run, tmp_path / "empty") == tmp_path / "empty"
    bare = CheckpointStore(tmp_path / "bare").save(1, {"word": [View.whole(torch.ones(5, 2))]})
    with pytest.raises(CheckpointError, match="cannot be exported: it has no record of its model"):
        export_hf(bare, tmp_path / "back")


def test_the_command_takes_iterations_and_sizes(folder, tmp_path, capsys):
    run, back = str(tmp_path / "run"), tmp_path / "back"
    assert main(["convert", str(folder), run, "--iteration", "3"]) == 0
    assert main(["convert", str(folder), run]) == 0
    names = [f"{run}/iter_0000003", f"{run}/iter_0000000"]
    assert capsys.readouterr().out.splitlines() == names
    size = ["--max-shard-gb", "8.8e-8", "--iteration", "3"]  # 88 bytes
    assert main(["convert", "--to-hf", run, str(back), *size]) == 0
    assert len(list(back.glob("*.safetensors"))) == 2
    capsys.readouterr()
    assert main(["inspect", run, "--iteration", "0"]) == 0
    assert "iteration   0\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"megatron-ckpt {__version__}\n"


def test_files_of_weights_have_5_gb_unless_another_size_is_given():
    words = ["convert", "a", "b"]
    assert build_parser().parse_args(words).max_shard_gb == 5.0
    default = inspect.signature(export_hf).parameters["max_shard_bytes"].default
    assert default == 5_000_000_000


def test_a_gigabyte_has_a_thousand_million_bytes(folder, tmp_path, monkeypatch):
    run, sizes = str(import_hf(folder, tmp_path / "run")), []

    def export(*_, max_shard_bytes, **settings):
        sizes.append(max_shard_bytes)

    monkeypatch.setattr("megatron_ckpt.convert.export_hf", export)
    for words in ([], ["--max-shard-gb", "1"], ["--max-shard-gb", "0.25"]):
        assert main(["convert", "--to-hf", run, str(tmp_path / "back"), *words]) == 0
    assert sizes == [5_000_000_000, 1_000_000_000, 250_000_000]


def test_an_import_does_not_replace_a_checkpoint(folder, tmp_path):
    made = import_hf(folder, tmp_path / "run", iteration=3)
    digest = Checkpoint(made).digest
    with pytest.raises(CheckpointError, match="iter_0000003 exists and is complete"):
        import_hf(folder, tmp_path / "run", iteration=3, dtype=torch.float16)
    assert Checkpoint(made).digest == digest


def test_files_of_a_tokenizer_keep_their_folders(tmp_path):
    record = ModelRecord("toys", "toy", 3, TOY_FIELDS | {"num_layers": 0})
    tensors = {"word": [View.whole(torch.ones(5, 2))]}
    files = {f"tokenizer/templates/more/{name}": name.encode() for name in ("a", "b")}
    run = CheckpointStore(tmp_path / "run").save(1, tensors, model=record, files=files)
    back = export_hf(run, tmp_path / "back")
    assert {path.name: path.read_text() for path in (back / "templates" / "more").iterdir()} == {
        "a": "a",
        "b": "b",
    }


def test_settings_of_another_program_keep_all_their_letters(folder, tmp_path):
    """JSON may escape half of a surrogate pair, which UTF-8 cannot encode."""
    path = folder / "config.json"
    more = {"author": "\u65e5", "half": "\ud800"}
    settings = json.loads(path.read_text()) | more
    path.write_text(json.dumps(settings))
    back = export_hf(import_hf(folder, tmp_path / "run"), tmp_path / "back")
    text = (back / "config.json").read_bytes().decode()
    found = json.loads(text)
    assert {name: found[name] for name in more} == more
    assert "\u65e5" in text


class Bar:
    """Records what a progress bar gets."""

    made: "Bar"

    def __init__(self, **settings):
        Bar.made = self
        self.settings, self.total, self.n, self.closed = settings, settings["total"], 0, False

    def reset(self, total):
        self.total, self.n = total, 0

    def update(self, more):
        assert more > 0 and self.n + more <= self.total
        self.n += more

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True


def test_a_bar_counts_the_bytes_that_are_written_or_compared(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    weights = (5 * 2 + 4 * 3 * 2) * 4
    read = {path.name: path.stat().st_size for path in folder.iterdir()}
    for words, total in (
        (["convert", str(folder), run], weights),
        (["convert", run, back, "--dtype", "bfloat16"], weights // 2),
        (["verify", run], None),
    ):
        assert main(words) == 0
        if total is None:
            made = Checkpoint(tmp_path / "run" / "iter_0000000").path
            held = [path for path in made.rglob("*") if path.is_file()]
            total = sum(path.stat().st_size for path in held if path.name != "MANIFEST.json")
            assert total > weights + read["tokenizer.json"] + read["config.json"]
        assert (Bar.made.n, Bar.made.total, Bar.made.closed) == (total, total, True)
        size = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "disable": None}
        first = total if words[0] == "verify" else 0
        assert Bar.made.settings == {"desc": words[0], "total": first, **size}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("length", "lines"), [(41, 1), (42, 2)])
def test_settings_have_100_columns_outside_of_a_terminal(
    tmp_path, capsys, monkeypatch, length, lines
):
    def no_terminal(*_):
        raise OSError

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    config = {"x" * 41: 1, "y" * length: 1}  # 12 + 44 + 1 + 43 columns
    run = CheckpointStore(tmp_path).save(1, {}, model=ModelRecord("toys", "toy", 3, config))
    assert main(["inspect", str(run)]) == 0
    shown = [
        line for line in capsys.readouterr().out.splitlines() if "xxx" in line or "yyy" in line
    ]
    assert len(shown) == lines and max(map(len, shown)) <= 100


def test_settings_are_broken_between_them_only(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    config = {"a": 1, "two-words": "one-of-many-kinds-of-text", "x" * 40: -1}
    run = CheckpointStore(tmp_path).save(1, {}, model=ModelRecord("toys", "toy", 3, config))
    assert main(["inspect", str(run)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" " * 12)]
    expected = ["a 1,", "two-words one-of-many-kinds-of-text,", "x" * 40 + " -1"]
    assert shown == [" " * 12 + line for line in expected]


SIZES = [
    (1, "1 B"),
    (1023, "1023 B"),
    (1024, "1.0 KiB"),
    (1024**2 - 1024, "1023.0 KiB"),
    (1024**2, "1.0 MiB"),
]


@pytest.mark.parametrize(("size", "shown"), SIZES)
def test_sizes_are_shown_in_powers_of_1024(tmp_path, capsys, size, shown):
    tensor = torch.zeros(size, dtype=torch.uint8)
    run = CheckpointStore(tmp_path).save(1, {"w": [View.whole(tensor)]})
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"model: 1 tensors, {size:,} elements, {shown}\n" in out
    assert out.endswith(f"  w  U8    {size:<18} {shown}\n")


def test_no_unit_is_larger_than_gibibytes():
    assert [_size(count) for count in (1024**3 - 1024**2, 1024**3, 3 << 40)] == [
        "1023.0 MiB",
        "1.0 GiB",
        "3072.0 GiB",
    ]


def test_a_listing_shows_groups_layers_and_files_in_columns(tmp_path, capsys):
    shapes = {"a.0.w": (2, 3), "a.1.w": (2, 3), "a.2.w": (3, 2), "long.name": (), "a.0.w.m": (4,)}
    state = {name: [View.whole(torch.zeros(shape))] for name, shape in shapes.items()}
    record = ModelRecord("toys", None, 3, {})
    run = CheckpointStore(tmp_path).save(12, state, model=record, files={"notes": b"12345"})
    assert main(["inspect", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checkpoint  {run}"
    assert lines[1] == "iteration   12"
    assert lines[2] == f"digest      {Checkpoint(run).digest}"
    assert lines[3].startswith("saved by    1 rank(s), megatron-ckpt ")
    assert "model       toys, no family, configuration of version 3" in lines
    assert "         5 B  notes" in lines
    model = lines.index("model: 4 tensors, 19 elements, 76 B")
    assert lines[model + 1 :] == [
        "  a.{i}.w    F32   2x3                2 x 24 B",
        "  a.{i}.w    F32   3x2                24 B",
        "  long.name  F32   scalar             4 B",
        "optim: 1 tensors, 4 elements, 16 B",
        "  a.{i}.w.m  F32   4                  16 B",
    ]
    assert main(["verify", str(run)]) == 0
    total = sum(record.size for record in Checkpoint(run).manifest.files.values())
    assert capsys.readouterr().out == f"{run}: 4 files, {total} B, all digests match\n"


def test_errors_of_ranks_reach_all_of_them_and_the_lowest_is_reported(on_ranks):
    def failing(*ranks):
        def one(coordinator):
            def value():
                if coordinator.rank in ranks:
                    raise (KeyError, OSError, ValueError)[coordinator.rank](f"x{coordinator.rank}")
                return coordinator.rank

            return map_reduce(coordinator, value, lambda values: [*values, len(values)])

        return on_ranks(3, one)

    assert failing() == [[0, 1, 2, 3]] * 3
    first = failing(0)
    assert isinstance(first[0], KeyError)
    # The types of mistakes in programs are named, since their messages alone say little.
    assert [str(error) for error in first[1:]] == ["rank 0: KeyError: 'x0'"] * 2
    second = failing(1, 2)
    assert isinstance(second[1], OSError)
    assert [type(error) for error in (second[0], second[2])] == [CheckpointError] * 2
    assert str(second[0]) == str(second[2]) == "rank 1: x1"
