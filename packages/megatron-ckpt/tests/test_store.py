import json
import logging
import os
from dataclasses import is_dataclass

import pytest
import torch
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    DirectoryInUseError,
    ModelRecord,
    View,
    dtypes,
    find_checkpoint,
    run_lock,
)
from megatron_ckpt.store import manifest, writer
from safetensors import safe_open
from safetensors.torch import load_file

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def whole(tensors):
    return {name: [View.whole(tensor)] for name, tensor in tensors.items()}


def simple(value=1.0):
    return {"w": torch.full((4, 3), value), "w.exp_avg": torch.full((4, 3), value + 0.5)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips_bit_for_bit(tmp_path, dtype):
    generator = torch.Generator().manual_seed(1)
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (5 * size,), generator=generator, dtype=torch.uint8)
    tensor = data.view(dtype).reshape(5)
    store = CheckpointStore(tmp_path)
    store.save(1, whole({"w": tensor}))
    back = torch.zeros_like(tensor)
    store.load(1, whole({"w": back}))
    assert torch.equal(bits(back), bits(tensor))
    by_library = load_file(store.path(1) / "model-00000-of-00001.safetensors")["w"]
    assert by_library.dtype == dtype and torch.equal(bits(by_library), bits(tensor))


def test_dtypes_have_torchs_sizes():
    for name, (spelled, size, floating) in dtypes.DTYPES.items():
        dtype = getattr(torch, spelled)
        assert (dtype.itemsize, dtype.is_floating_point) == (size, floating), name


def test_tensors_of_all_dtypes_are_aligned_in_their_file(tmp_path):
    """Their sizes are odd, and their names in the order that would misalign them."""
    for name in ("n", "name"):  # headers of several lengths
        sizes = sorted(DTYPES, key=lambda dtype: dtype.itemsize)
        tensors = {f"{i:02}.{name}": torch.zeros(3, dtype=d) for i, d in enumerate(sizes)}
        store = CheckpointStore(tmp_path / name)
        store.save(1, whole(tensors))
        data = (store.path(1) / "model-00000-of-00001.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") and header.keys() == tensors.keys()
        assert length % 8 == 0
        for key, row in header.items():
            assert (8 + length + row["data_offsets"][0]) % tensors[key].itemsize == 0, key


def test_a_file_says_that_its_tensors_are_torchs(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, whole(simple()))
    with safe_open(store.path(1) / "model-00000-of-00001.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses files without it


def test_a_run_holds_its_folder_until_it_ends(tmp_path):
    folder = tmp_path / "runs" / "first"
    for _ in range(2):  # the folder is created, and locked again
        with run_lock(folder, "train  --lr 1"):
            second = run_lock(str(folder), timeout=0.0)
            with (
                pytest.raises(DirectoryInUseError, match="in use by another run") as refused,
                second,
            ):
                pass
            CheckpointStore(folder).save(
                1, whole(simple()), replace=True
            )  # saves do not check this lock
    assert refused.value.directory == folder
    assert refused.value.holder.startswith(f"pid {os.getpid()} on ")
    assert refused.value.holder.endswith(" UTC: train --lr 1")


@pytest.mark.parametrize("module", [manifest, writer])
def test_records_and_plans_cannot_be_changed(module):
    made = [c for c in vars(module).values() if is_dataclass(c) and c.__module__ == module.__name__]
    assert made and all(one.__dataclass_params__.frozen for one in made)


def test_scalar_empty_transposed_and_device_views_are_saved_by_value(tmp_path):
    tensors = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.ones(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "strided": torch.arange(10)[::2],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    store = CheckpointStore(tmp_path)
    store.save(1, whole(tensors))
    by_library = load_file(store.path(1) / "model-00000-of-00001.safetensors")
    back = {name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}
    store.load(None, whole(back))
    for name, tensor in tensors.items():
        assert torch.equal(by_library[name], tensor), name
        assert torch.equal(back[name], tensor), name
        assert torch.equal(Checkpoint(store.path(1)).read_tensor(name), tensor), name


def test_loading_writes_into_parameters_and_strided_tensors_in_place(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, whole({"w": torch.arange(12.0).reshape(3, 4)}))
    base = torch.zeros(4, 3)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    where = parameter.data_ptr()
    store.load(1, {"w": [View.whole(base.t()), View.whole(parameter)]})
    assert torch.equal(base.t(), torch.arange(12.0).reshape(3, 4))
    assert torch.equal(parameter, base.t()) and parameter.data_ptr() == where


def test_optimizer_state_is_a_separate_file_that_the_model_does_not_need(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(7, {**whole(simple(2.0)), "samples": 70})
    assert sorted(p.name for p in path.iterdir()) == [
        "MANIFEST.json",
        "model-00000-of-00001.safetensors",
        "optim-00000-of-00001.safetensors",
        "state.json",
    ]
    optimizer = path / "optim-00000-of-00001.safetensors"
    optimizer.write_bytes(bytes(optimizer.stat().st_size))  # any read of it fails from here on
    model = {"w": torch.zeros(4, 3)}
    state = store.load(None, whole(model), groups=["model"])
    assert torch.equal(model["w"], simple(2.0)["w"])
    assert state == {"samples": 70} and state.iteration == 7
    with pytest.raises(CheckpointError, match=r"'w.exp_avg' of the checkpoint \(optim\)"):
        store.load(None, whole(model))


def test_equal_states_give_equal_bytes(tmp_path):
    state = {**whole(simple()), "z": 1, "a": {"b": [1.5]}}
    again = dict(reversed(state.items()))
    first = CheckpointStore(tmp_path / "1").save(3, state)
    second = CheckpointStore(tmp_path / "2").save(3, again)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_model_record_and_files_are_saved_and_checked(tmp_path):
    folder = tmp_path / "tokenizer"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "vocab.json").write_text("{}")
    config = {"num_layers": 2, "epsilon": 1e-05, "rope": None}
    store = CheckpointStore(tmp_path / "run")
    path = store.save(
        1,
        whole(simple()),
        model=ModelRecord("gpt", "gpt2", 1, config),
        files={"tokenizer": folder, "notes/readme.txt": b"hello"},
    )
    checkpoint = Checkpoint(path)
    assert checkpoint.model == ModelRecord("gpt", "gpt2", 1, config)
    assert checkpoint.read_file("notes/readme.txt") == b"hello"
    assert (path / "tokenizer" / "deep" / "vocab.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match=r"'notes/readme.tx' \(nearest: 'notes/readme.txt'\)"):
        checkpoint.read_file("notes/readme.tx")
    (path / "notes" / "readme.txt").write_bytes(b"hullo")
    with pytest.raises(CorruptCheckpointError, match=r"readme.txt.*digest differs"):
        checkpoint.read_file("notes/readme.txt")


def test_a_folder_with_a_file_or_link_that_was_not_saved_is_refused(tmp_path):
    folder = tmp_path / "tokenizer"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "vocab.json").write_text("{}")
    path = CheckpointStore(tmp_path / "run").save(1, {}, files={"tokenizer": folder})
    checkpoint = Checkpoint(path)
    assert checkpoint.verified_folder("tokenizer") == path / "tokenizer"
    for name in ("added.json", "deep/added.json", "linked"):
        added = path / "tokenizer" / name
        if name == "linked":
            added.symlink_to(folder)
        else:
            added.write_text("{}")
        with pytest.raises(CorruptCheckpointError, match=f"{added} is not in the manifest"):
            checkpoint.verified_folder("tokenizer")
        added.unlink()
    checkpoint.verified_folder("tokenizer")


@pytest.mark.parametrize("name", ["../x", "/x", "state.json", "MANIFEST.json", "x.safetensors", ""])
def test_reserved_file_names_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"cannot hold a file|is not a valid file name"):
        CheckpointStore(tmp_path / "run").save(1, whole(simple()), files={name: b""})
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_may_be_moved_and_read_alone(tmp_path):
    CheckpointStore(tmp_path / "run").save(5, {**whole(simple()), "n": 1})
    copied = (tmp_path / "run" / "iter_0000005").rename(tmp_path / "copy")
    back = {name: torch.zeros(4, 3) for name in simple()}
    assert find_checkpoint(copied).load(whole(back)) == {"n": 1}
    assert torch.equal(back["w"], simple()["w"])


def test_names_and_shapes_that_differ_are_refused_with_the_nearest(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, whole({"layers.0.up.weight": torch.ones(4), "b": torch.ones(1)}))
    cases = {
        r"no tensor 'layers.0.up.weigth' \(nearest: 'layers.0.up.weight'\)": {
            "layers.0.up.weigth": torch.zeros(4)
        },
        r"'b' of the checkpoint \(model\) does not exist in the model": {
            "layers.0.up.weight": torch.zeros(4)
        },
        r"shape \(4,\) in the checkpoint but \(5,\) in the model": {
            "layers.0.up.weight": torch.zeros(5)
        },
        r"stored as F32, but the model has I32": {
            "layers.0.up.weight": torch.zeros(4, dtype=torch.int32),
            "b": torch.zeros(1),
        },
    }
    for words, tensors in cases.items():
        with pytest.raises(CheckpointError, match=words):
            store.load(1, whole(tensors))
        assert all(not tensor.any() for tensor in tensors.values())


def test_tensors_that_are_unused_need_not_be_named(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, whole({"trunk": torch.ones(4), "head": torch.ones(2), "other": torch.ones(1)}))
    trunk = torch.zeros(4)
    store.load(1, whole({"trunk": trunk}), unused={"head", "other", "no such tensor"})
    assert trunk.all()
    with pytest.raises(CheckpointError, match="'other' of the checkpoint"):
        store.load(1, whole({"trunk": trunk}), unused={"head"})


@pytest.mark.gpu
def test_tensors_of_a_device_are_saved_and_filled_where_they_are(tmp_path, device):
    store = CheckpointStore(tmp_path)
    tensor = torch.randn(300, 7, device=device, dtype=torch.bfloat16)
    store.save(1, whole({"w": tensor}))
    back = torch.zeros_like(tensor)
    store.load(1, whole({"w": back}))
    assert torch.equal(back, tensor)


def test_floating_point_is_converted_only_when_asked(tmp_path):
    store = CheckpointStore(tmp_path)
    stored = torch.randn(8, dtype=torch.float32)
    store.save(1, whole({"w": stored}))
    half = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="cast='floating'"):
        store.load(1, whole({"w": half}))
    store.load(1, whole({"w": half}), cast="floating")
    assert torch.equal(half, stored.bfloat16())
    with pytest.raises(CheckpointError, match="the model has I64"):
        store.load(1, whole({"w": torch.zeros(8, dtype=torch.int64)}), cast="floating")


def test_the_newest_complete_checkpoint_is_loaded_and_torn_ones_are_named_once(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    for iteration in (10, 20, 30):
        store.save(iteration, {**whole(simple(float(iteration))), "n": iteration})
    (store.path(30) / "MANIFEST.json").unlink()
    (tmp_path / "iter_0000040.tmp-0123abcd").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30\n")
    with caplog.at_level(logging.WARNING):
        assert store.latest_iteration() == 20
    (warning,) = caplog.messages
    assert "iter_0000040.tmp-0123abcd is an unfinished save" in warning
    assert "iter_0000030 is torn: it has no MANIFEST.json" in warning
    assert "using iteration 20" in warning
    back = {name: torch.zeros(4, 3) for name in simple()}
    assert store.load(None, whole(back))["n"] == 20
    assert caplog.messages == [warning] * 2
    assert torch.equal(back["w"], simple(20.0)["w"])


def test_naming_a_torn_or_absent_checkpoint_is_an_error(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(10, whole(simple()))
    store.save(20, whole(simple()))
    (store.path(20) / "model-00000-of-00001.safetensors").unlink()
    back = whole(simple())
    with pytest.raises(CorruptCheckpointError, match=r"torn: model-00000-of-00001.* is missing"):
        store.load(20, back)
    with pytest.raises(CorruptCheckpointError, match="torn"):
        find_checkpoint(store.path(20))
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 15; it has 10"):
        store.load(15, back)
    with pytest.raises(CheckpointError, match="is not a directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint; give the folder of a run"):
        CheckpointStore(tmp_path / "nowhere").load(None, back)
    assert CheckpointStore(tmp_path / "nowhere").latest_iteration() is None
    renamed = store.path(10).rename(store.path(99))
    with pytest.raises(CorruptCheckpointError, match="was renamed: its manifest has iteration 10"):
        store.load(99, back)
    assert renamed.exists()


def test_an_existing_checkpoint_is_replaced_only_when_asked(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(10, whole(simple(1.0)))
    with pytest.raises(CheckpointError, match="exists and is complete"):
        store.save(10, whole(simple(2.0)))
    back = {name: torch.zeros(4, 3) for name in simple()}
    store.load(10, whole(back))
    assert torch.equal(back["w"], simple(1.0)["w"])
    store.save(10, whole(simple(2.0)), replace=True)
    store.load(10, whole(back))
    assert torch.equal(back["w"], simple(2.0)["w"])
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000010"]
    (store.path(10) / "MANIFEST.json").write_text("{")
    store.save(10, whole(simple(3.0)))
    store.load(10, whole(back))
    assert torch.equal(back["w"], simple(3.0)["w"])


def test_the_pointer_file_is_written_but_never_read(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(10, whole(simple()))
    store.save(20, whole(simple()))
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "20\n"
    for text in ("", "release", "999"):
        pointer.write_text(text)
        assert store.latest_iteration() == 20


def test_a_newer_format_is_refused_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_ckpt.store.manifest.FORMAT_VERSION", 2)
    store = CheckpointStore(tmp_path)
    path = store.save(1, whole(simple()))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format megatron-ckpt 2.*use a newer version"):
        Checkpoint(path)
    assert json.loads((path / "MANIFEST.json").read_text())["format_version"] == 2


def test_only_the_blocks_that_are_needed_are_read(tmp_path, small_blocks):
    store = CheckpointStore(tmp_path)
    tensor = torch.arange(1024.0)
    path = store.save(1, whole({"w": tensor}))
    file = path / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    part = torch.zeros(100)
    store.load(1, {"w": [View(part, (1024,), (200,), (100,))]})
    assert torch.equal(part, tensor[200:300])
    last = {"w": [View(part, (1024,), (924,), (100,))]}
    with pytest.raises(CorruptCheckpointError, match="digest differs"):
        store.load(1, last)
    store.load(1, last, verify=False)
    assert torch.equal(part[:-1], tensor[924:-1]) and part[-1] != tensor[-1]


def test_a_part_of_long_rows_reads_only_its_bytes(tmp_path, small_blocks, monkeypatch):
    from megatron_ckpt.store import blocks

    store = CheckpointStore(tmp_path)
    tensor = torch.arange(200.0).reshape(10, 2, 10)  # rows of 80 bytes are read one by one
    store.save(1, whole({"w": tensor}))
    read = []
    real = blocks.read_into

    def counting(descriptor, buffer, start):
        read.append(len(buffer))
        return real(descriptor, buffer, start)

    monkeypatch.setattr(blocks, "read_into", counting)
    part = torch.zeros(10, 1, 10)
    into = {"w": [View(part, (10, 2, 10), (0, 1, 0), (10, 1, 10))]}
    Checkpoint(store.path(1)).load_tensors(into, verify=False)
    assert torch.equal(part, tensor[:, 1:])
    assert sum(read) == part.nbytes
