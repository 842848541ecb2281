"""The store at its limits: sizes of blocks and files, folders in every state, bytes reported."""

import json
import os
import re
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    Retention,
    View,
    describe_foreign_checkpoint,
    find_checkpoint,
)
from megatron_ckpt._version import __version__
from megatron_ckpt.store import checkpoint as checkpoint_module
from megatron_ckpt.store import lock, writer
from megatron_ckpt.store.blocks import (
    BlockReader,
    BlockWriter,
    FileRecord,
    copy_file,
    digest,
    write_file,
)
from megatron_ckpt.store.checkpoint import CheckpointTensors
from megatron_ckpt.store.directory import (
    entries,
    iteration_name,
    remove_leftovers,
    scan_directories,
)
from megatron_ckpt.store.foreign import is_importable
from megatron_ckpt.store.tensorfile import TensorEntry, header, write_tensor_file
from megatron_ckpt.store.writer import split_state


def save(folder, iteration=1, **settings):
    tensors = {"w": torch.arange(6.0).view(2, 3), "w.exp_avg": torch.zeros(2, 3)}
    state = {name: [View.whole(tensor)] for name, tensor in tensors.items()}
    return CheckpointStore(folder).save(iteration, {**state, "n": iteration}, **settings)


def opened():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 512, 700])
def test_a_file_has_a_digest_for_each_block_and_for_the_rest(tmp_path, small_blocks, size):
    data = bytes(number % 251 for number in range(size))
    blocks = tuple(digest(data[at : at + 256]) for at in range(0, size, 256))
    record = write_file(tmp_path / "a", data)
    assert (record.size, record.blocks) == (size, blocks)
    assert copy_file(tmp_path / "a", tmp_path / "b") == record
    assert (tmp_path / "b").read_bytes() == data
    with (tmp_path / "c").open("wb") as file:
        writer = BlockWriter(file.fileno())
        for at in range(0, size, 100):  # writes that do not end with blocks
            writer.write(data[at : at + 100])
    assert writer.record() == record and (tmp_path / "c").read_bytes() == data
    reported = []
    with BlockReader(tmp_path, "b", record) as reader:
        reader.check(reported.append)
        assert reported == [min(256, size - at) for at in range(0, size, 256)]
        for start in range(0, size, 90):
            length = min(300, size - start)
            assert bytes(reader.view(start, length)) == data[start : start + length]
            assert reader.bytes_left_in_block(start) == 256 - start % 256
        content = bytearray(size)
        reader.read_into(content, 0)
        assert content == data
    with BlockReader(tmp_path, "b", record, verify=False) as reader:
        assert bytes(reader.view(size // 2, size - size // 2)) == data[size // 2 :]


def test_a_file_of_another_size_is_refused_and_closed(tmp_path):
    record = write_file(tmp_path / "a", b"12345")
    before = opened()
    (tmp_path / "a").write_bytes(b"1234")
    with pytest.raises(CorruptCheckpointError, match="has 4 bytes instead of 5 in the manifest"):
        BlockReader(tmp_path, "a", record)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is a pipe"):
        copy_file(tmp_path / "pipe", tmp_path / "b")
    assert opened() == before


def test_a_file_that_shrinks_while_it_is_read_is_torn(tmp_path, small_blocks):
    record = write_file(tmp_path / "a", bytes(600))
    with BlockReader(tmp_path, "a", record) as reader:
        reader.view(0, 10)
        os.truncate(tmp_path / "a", 300)
        with pytest.raises(CorruptCheckpointError, match="became shorter while it was read"):
            reader.view(500, 10)


def test_consecutive_ranges_of_a_block_are_read_once(tmp_path, small_blocks, monkeypatch):
    record, read = write_file(tmp_path / "a", bytes(600)), []
    fill = BlockReader._fill
    monkeypatch.setattr(BlockReader, "_fill", lambda *given: read.append(given[2]) or fill(*given))
    with BlockReader(tmp_path, "a", record) as reader:
        for start in (0, 100, 200, 300, 250, 290):
            reader.view(start, 10)
    assert read == [0, 256, 0, 256]  # the ranges at 250 and 260 need both blocks


def test_an_error_in_a_block_leaves_the_others_readable(tmp_path, small_blocks):
    data = bytes(number % 251 for number in range(700))
    record = write_file(tmp_path / "a", data)
    (tmp_path / "a").write_bytes(data[:300] + b"x" + data[301:])
    with BlockReader(tmp_path, "a", record) as reader:
        for _ in range(2):
            assert bytes(reader.view(0, 9)) == data[:9]
            assert bytes(reader.view(690, 10)) == data[690:]
            with pytest.raises(CorruptCheckpointError, match=r"bytes 256 to 512 changed since"):
                reader.view(260, 5)


def test_files_up_to_the_limit_are_read_into_memory(tmp_path, monkeypatch):
    checkpoint = Checkpoint(save(tmp_path, files={"notes": b"12345"}))
    monkeypatch.setattr(checkpoint_module, "MAX_FILE_BYTES", 5)
    assert checkpoint.read_file("notes") == b"12345"
    monkeypatch.setattr(checkpoint_module, "MAX_FILE_BYTES", 4)
    with pytest.raises(CheckpointError, match="has 5 bytes; the limit for reading a file into me"):
        checkpoint.read_file("notes")
    with pytest.raises(CheckpointError, match="has no folder 'note'"):
        checkpoint.verified_folder("note")
    with pytest.raises(CheckpointError, match=r"no tensor 'w.exp_av' \(nearest: 'w.exp_avg'\)"):
        checkpoint.read_tensor("w.exp_av")


def test_the_tensors_of_a_group_are_a_mapping(tmp_path):
    checkpoint = Checkpoint(save(tmp_path))
    model, optim = CheckpointTensors(checkpoint), CheckpointTensors(checkpoint, "optim")
    assert (list(model), list(optim), len(model)) == (["w"], ["w.exp_avg"], 1)
    assert torch.equal(model["w"], torch.arange(6.0).view(2, 3))
    assert {n: (t.shape, t.is_meta) for n, t in model.meta().items()} == {"w": ((2, 3), True)}
    with pytest.raises(KeyError):
        model["w.exp_avg"]
    assert "w.exp_avg" not in model


def test_saving_and_loading_report_the_bytes_of_each_tensor(tmp_path):
    written, read = [], []
    path = save(tmp_path, progress=written.append)
    assert written == [24, 24]
    part = torch.zeros(2, 2)
    into = {"w": [View(part, (2, 3), (0, 1), (2, 2))], "w.exp_avg": []}
    Checkpoint(path).load(into, groups=["model"], progress=read.append)
    assert read == [16] and part.tolist() == [[1.0, 2.0], [4.0, 5.0]]
    reported = []
    assert Checkpoint(path).verify(reported.append) == []
    assert sum(reported) == sum(
        f.stat().st_size for f in path.iterdir() if f.name != "MANIFEST.json"
    )


@pytest.mark.parametrize("mark", ".:/@#")
def test_a_name_with_a_suffix_belongs_to_the_optimizer(mark):
    view = [View.whole(torch.ones(1))]
    names = {"a": "model", f"a{mark}mean": "optim", "a-mean": "model", f"b{mark}mean": "model"}
    shards, values = split_state({**dict.fromkeys(names, view), "none": [], "some": [1]})
    assert {shard.name: shard.group for shard in shards} == names
    assert values == {"none": "[]", "some": "[1]"}


def test_views_of_one_tensor_on_a_rank_have_one_dtype_and_shape(tmp_path):
    for other in (torch.ones(2).double(), torch.ones(2)):
        shape = (4,) if other.dtype == torch.float64 else (5,)
        views = [View(torch.ones(2), (4,), (0,), (2,)), View(other, shape, (2,), (2,))]
        with pytest.raises(CheckpointError, match="tensor 'w': views on one rank differ: F32"):
            CheckpointStore(tmp_path).save(1, {"w": views})


def test_weights_of_another_program_may_lie_in_a_folder_of_files(tmp_path):
    path = save(tmp_path, files={"deep/x.safetensors": b"1"})
    assert Checkpoint(path).read_file("deep/x.safetensors") == b"1"


def test_a_tensor_file_holds_what_was_announced_under_different_names(tmp_path):
    def entry(key, shape=(2,), produced=None):
        made = torch.ones(shape) if produced is None else produced
        return TensorEntry(key, "F32", shape, lambda: made)

    with pytest.raises(CheckpointError, match="cannot hold two tensors of the name 'a'"):
        header([entry("a"), entry("a")], {})
    with pytest.raises(CheckpointError, match="'__metadata__'"):
        header([entry("__metadata__")], {})
    data, starts = header([entry("a", (2, 3)), entry("b", ()), entry("c", (0, 4))], {})
    length = int.from_bytes(data[:8], "little")
    assert len(data) == 8 + length and length % 8 == 0
    assert starts == [8 + length, 8 + length + 24, 8 + length + 28]
    content = json.loads(data[8:])
    assert "__metadata__" not in content
    assert content["b"] == {"dtype": "F32", "shape": [], "data_offsets": [24, 28]}
    for number, produced in enumerate((torch.ones(3), torch.ones(2).double())):
        with pytest.raises(CheckpointError, match=r"tensor 'a' is F.*, expected F32 \(2,\)"):
            write_tensor_file(tmp_path / str(number), [entry("a", produced=produced)])


def test_folders_are_listed_from_the_newest_and_plain_ones_first(tmp_path):
    names = ["iter_0000002.trash-0a", "iter_0000002", "iter_0000010", "iter_12345678", "iter_3"]
    names += ["iter_0000002.tmp-0a", "iter_0000002.replaced-0a", "iter_0000004.other-0a", "x"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000005").touch()
    found = [(iteration, kind, path.name) for iteration, kind, path in entries(tmp_path)]
    assert found == [
        (12345678, "", "iter_12345678"),
        (10, "", "iter_0000010"),
        (2, "", "iter_0000002"),
        (2, "replaced", "iter_0000002.replaced-0a"),
        (2, "tmp", "iter_0000002.tmp-0a"),
        (2, "trash", "iter_0000002.trash-0a"),
    ]
    assert entries(tmp_path / "nowhere") == []
    assert (iteration_name(7), iteration_name(12345678)) == ("iter_0000007", "iter_12345678")


def test_a_replaced_checkpoint_stands_in_until_its_successor_is_complete(tmp_path):
    path = save(tmp_path)
    former = path.rename(tmp_path / "iter_0000001.replaced-0a")
    assert [c.path for c in scan_directories(tmp_path) if c.manifest] == [former]
    path.mkdir()  # torn
    remove_leftovers(tmp_path)
    assert former.exists() and path.exists()
    assert [c.path for c in scan_directories(tmp_path) if c.manifest] == [former]
    path.rmdir()
    pointer = tmp_path / "latest_checkpointed_iteration.txt.tmp-12"
    kept = tmp_path / "latest_checkpointed_iteration.txt.tmp-x"
    for each in (pointer, kept):
        each.touch()
    remove_leftovers(tmp_path)
    assert not former.exists() and find_checkpoint(tmp_path).path == path
    assert not pointer.exists() and kept.exists()
    again = path.rename(tmp_path / "iter_0000001.replaced-0b")
    save(tmp_path, replace=True)
    assert not again.exists() and len(list(scan_directories(tmp_path))) == 1


def test_a_complete_checkpoint_hides_its_replaced_copy(tmp_path):
    """A save was killed between the new name and the deletion of the former folder."""
    path = save(tmp_path, 2)
    copied = tmp_path / "iter_0000002.replaced-0a"
    shutil.copytree(path, copied)
    assert [candidate.path for candidate in scan_directories(tmp_path)] == [path]
    save(tmp_path, 3, retention=Retention(latest=1))
    assert [each.name for each in tmp_path.glob("iter_*")] == ["iter_0000003"]


def test_a_folder_of_an_iteration_is_opened_by_its_name_or_manifest(tmp_path):
    path = save(tmp_path, 3)
    assert find_checkpoint(path, 3).iteration == find_checkpoint(path).iteration == 3
    with pytest.raises(CheckpointError, match="is not iteration 4; use its parent directory"):
        find_checkpoint(path, 4)
    assert find_checkpoint(tmp_path, 3).path == path
    moved = path.rename(tmp_path / "copy")
    assert find_checkpoint(moved).iteration == 3
    (tmp_path / "iter_0000009").mkdir()
    with pytest.raises(CorruptCheckpointError, match="is torn"):
        find_checkpoint(tmp_path / "iter_0000009")


def test_what_can_be_imported_differs_from_checkpoints(tmp_path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "a.bin").touch()
    (tmp_path / "hf").mkdir()
    assert is_importable(tmp_path / "a.gguf") and not is_importable(tmp_path / "a.bin")
    assert not is_importable(tmp_path / "hf") and not is_importable(tmp_path / "nowhere")
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert is_importable(str(tmp_path / "hf"))
    (tmp_path / "hf" / "iter_0000001").mkdir()
    assert not is_importable(tmp_path / "hf")
    for name in ("plain/mp_rank_00", "released/release/mp_rank_00"):
        (tmp_path / name).mkdir(parents=True)
        found = describe_foreign_checkpoint(tmp_path / Path(name).parts[0])
        assert found is not None and found.startswith("holds checkpoints of Megatron-LM")


@pytest.mark.parametrize(
    ("content", "holder"),
    [
        (b"", "unknown"),
        (b" \n", "unknown"),
        (b"pid 3\non\x1b[1m a", "pid 3 on [1m a"),
        (b"x" * 501, "x" * 500),
    ],
)
def test_the_holder_of_a_lock_is_one_printable_line(tmp_path, content, holder):
    (tmp_path / ".run.lock").touch()
    with (
        lock.run_lock(tmp_path),
        pytest.raises(lock.DirectoryInUseError) as caught,
        lock.run_lock(
            tmp_path, timeout=_after(lambda: (tmp_path / ".run.lock").write_bytes(content))
        ),
    ):
        pass
    assert caught.value.holder == holder
    assert f"({holder}); wait until it ends" in str(caught.value)


def _after(act):
    """Acts, and returns no time to wait."""
    act()
    return 0.0


def test_a_directory_is_being_written_only_while_its_lock_is_held(tmp_path):
    assert not lock.is_being_written(tmp_path)
    before = opened()
    with lock.writer_lock(tmp_path):
        assert lock.is_being_written(tmp_path)
        with (
            pytest.raises(CheckpointError, match="use a separate directory for each run"),
            lock.writer_lock(tmp_path, 0.0),
        ):
            pass
    assert not lock.is_being_written(tmp_path) and opened() == before
    with lock.run_lock(tmp_path):
        assert (tmp_path / ".run.lock").read_text().endswith(" UTC\n")  # without a command


def test_a_file_of_more_than_a_gibibyte_is_not_read_into_memory(tmp_path):
    path = save(tmp_path)
    manifest = Checkpoint(path).manifest
    for size, error, words in (
        ((1 << 30) + 1, CheckpointError, "large has 1073741825 bytes; the limit .* 1073741824$"),
        (1 << 30, FileNotFoundError, "large"),  # within the limit, so it is looked for
    ):
        files = {**manifest.files, "large": FileRecord(size, ("0" * 32,) * 17)}
        with pytest.raises(error, match=words):
            Checkpoint(path, replace(manifest, files=files)).read_file("large")


@pytest.mark.parametrize("held", [lock.writer_lock, lock.run_lock])
def test_a_lock_is_waited_for_for_two_seconds(tmp_path, monkeypatch, held):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    def sleep(seconds):
        assert 0.0 < seconds <= 0.1
        clock.now += seconds

    clock.sleep = sleep
    with held(tmp_path):
        monkeypatch.setattr(lock, "time", clock)
        with pytest.raises(lock.DirectoryInUseError), held(tmp_path):
            pass
    assert 102.0 < clock.now < 102.2


@pytest.mark.parametrize("installed", [True, False])
def test_a_manifest_names_the_versions_that_saved_it(tmp_path, monkeypatch, installed):
    def missing(name):
        raise PackageNotFoundError(name)

    if not installed:
        monkeypatch.setattr(writer, "version", missing)
    found = Checkpoint(save(tmp_path)).manifest
    assert found.versions == {
        "megatron-ckpt": __version__,
        "torch": version("torch") if installed else "unknown",
    }
    assert found.world_size == 1


def test_empty_boxes_are_not_written_unless_the_tensor_is_empty(tmp_path):
    empty = torch.zeros(0, 3)
    views = {
        "w": [View.whole(torch.ones(2, 3)), View(empty, (2, 3), (2, 0), (0, 3))],
        "empty": [View.whole(empty)],
    }
    path = CheckpointStore(tmp_path).save(1, views)
    data = (path / "model-00000-of-00001.safetensors").read_bytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert sorted(head) == ["__metadata__", "empty", "w"]
    assert len(Checkpoint(path).tensors["w"].pieces) == 1


def test_tensors_of_other_ranks_are_wanted_in_their_shapes(tmp_path):
    checkpoint, mine = Checkpoint(save(tmp_path)), torch.zeros(2, 3)
    into = {"w": [View.whole(mine)]}
    assert checkpoint.load(into, remote_shapes={"w.exp_avg": [2, 3]}) == {"n": 1}
    assert torch.equal(mine, torch.arange(6.0).view(2, 3))
    checkpoint.check_shapes({"w": [2, 3]}, groups=["model"])
    for load in (
        lambda: checkpoint.load(into, remote_shapes={"w.exp_avg": [3, 2]}),
        lambda: checkpoint.load(into),
        lambda: checkpoint.check_shapes({"w": [2, 3]}),
    ):
        with pytest.raises(CheckpointError, match=r"w\.exp_avg"):
            load()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", r"state\.json is not a JSON object"),
        (b"{", r"state\.json: stored values cannot be"),
    ],
)
def test_values_that_are_no_object_are_damage(tmp_path, content, words):
    path = save(tmp_path)
    manifest = Checkpoint(path).manifest
    record = FileRecord(len(content), (digest(content),))
    changed = replace(manifest, files={**manifest.files, "state.json": record})
    (path / "state.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=words):
        Checkpoint(path, changed).values()


@pytest.mark.parametrize("state", [{"x": "a\udcff"}, {"\ud800": 1}, {"x": [{"\udcff": 1}]}])
def test_text_that_is_not_unicode_is_refused_by_name_before_anything_is_written(tmp_path, state):
    words = f"state {next(iter(state))!a} has an unpaired surrogate"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        CheckpointStore(tmp_path / "run").save(1, state)
    assert not (tmp_path / "run").exists()


def test_every_damaged_file_is_one_line(tmp_path):
    path = save(tmp_path, files={"notes": b"notes"})
    names = ("model-00000-of-00001.safetensors", "notes", "state.json")
    checkpoint = Checkpoint(path)
    for name in names[:2]:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    (path / names[2]).unlink()
    problems = checkpoint.verify()
    assert len(problems) == 3
    assert all(name in line for name, line in zip(names, sorted(problems), strict=True))
