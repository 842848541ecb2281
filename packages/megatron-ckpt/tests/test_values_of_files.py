"""Types of JSON values, and names and sizes of files, each just within and just out of range."""

import os
from pathlib import Path

import pytest
from megatron_ckpt import CheckpointError, CorruptCheckpointError
from megatron_ckpt.json_input import Fields, parse_object
from megatron_ckpt.paths import check_name, file_size, locate, open_file, open_regular, read_bytes
from megatron_ckpt.values import loads

LARGEST = (1 << 63) - 1
ACCEPTED = [
    ("integer", 0, 0),
    ("integer", LARGEST, LARGEST),
    ("integers", [], ()),
    ("integers", [0, LARGEST], (0, LARGEST)),
    ("text", "", ""),
    ("texts", ["a", ""], ("a", "")),
    ("texts", [], ()),
    ("dtype", "BF16", "BF16"),
    ("elements", [], []),
    ("items", {}, []),
]
REFUSED = [
    ("integer", -1, "not an integer of at least 0"),
    ("integer", LARGEST + 1, "not an integer"),
    ("integer", True, "not an integer"),
    ("integer", 1.0, "not an integer"),
    ("integers", [1, -1], "not a list of non-negative integers"),
    ("integers", [1, LARGEST + 1], "not a list"),
    ("integers", [False], "not a list"),
    ("integers", "12", "not a list"),
    ("integers", {}, "not a list"),
    ("text", 3, "not a string"),
    ("texts", "ab", "not a list of strings"),
    ("texts", ["a", 3], "not a list of strings"),
    ("dtype", "F5", "not a dtype; known are F64, F32"),
    ("elements", {}, "not a list"),
    ("elements", [3], r"key\[0\] is 3, not an object"),
    ("items", {"a": []}, r"key 'a' is \[\], not an object"),
    ("inner", None, "key is None, not an object"),
]


@pytest.mark.parametrize(("method", "value", "expected"), ACCEPTED)
def test_values_of_the_right_type_are_returned(method, value, expected):
    assert getattr(Fields({"key": value}, "file"), method)("key") == expected


@pytest.mark.parametrize(("method", "value", "words"), REFUSED)
def test_values_of_other_types_are_refused_with_file_and_key(method, value, words):
    fields = Fields({"key": value}, "file", CorruptCheckpointError)
    with pytest.raises(CorruptCheckpointError, match=f"^file: .*{words}"):
        getattr(fields, method)("key")
    with pytest.raises(CorruptCheckpointError, match=r"^file lacks 'other'$"):
        getattr(fields, method)("other")


def test_an_integer_may_have_another_least_value():
    fields = Fields({"key": 3}, "file")
    assert fields.integer("key", 3) == 3
    with pytest.raises(CheckpointError, match="key is 3, not an integer of at least 4"):
        fields.integer("key", 4)
    (name, inner), (_, last) = Fields({"key": {"a": {}, "b": {"x": 1}}}, "file").items("key")
    assert (name, inner.where, last.integer("x")) == ("a", "file: key 'a'", 1)
    assert [f.where for f in Fields({"k": [{}, {}]}, "f").elements("k")] == ["f: k[0]", "f: k[1]"]


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"[1]", "is not a JSON object"), (b"{", "is not JSON"), (b"\xff", "is not JSON")],
)
def test_what_is_no_object_is_refused(data, words):
    with pytest.raises(CorruptCheckpointError, match=f"^file {words}"):
        parse_object(data, "file", CorruptCheckpointError)
    assert parse_object("{}", "file") == {}
    nested = "[" * 100_000
    with pytest.raises(CheckpointError, match=r"nested too deeply|is not JSON"):
        parse_object(nested, "file")


@pytest.mark.parametrize("name", ["a", "a/b.c", ".a", "a..b", "x" * 255, "\u00e4" * 127, "..."])
def test_names_that_stay_inside_are_valid(name):
    assert check_name(name, "here") == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/a", "a/", "a//b", "a/../b", "a/./b", "a\\b", "a\nb"),
        *("x" * 256, "\u00e4" * 128, "a/" + "x" * 256, 3, None, b"a"),
        *("/" + "x" * 252, "/" + "x" * 253),  # 255 and 256 characters with the quotes
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(CheckpointError, match=r"^here: .* is not a valid file name") as caught:
        check_name(name, "here")
    shown = str(caught.value).removeprefix("here: ").partition(" is not a valid")[0]
    assert shown == (repr(name) if len(repr(name)) <= 255 else f"{repr(name)[:60]}...")


def test_files_are_read_up_to_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path, "a", 5) == b"12345" and file_size(tmp_path, "a") == 5
    with pytest.raises(CheckpointError, match="has 5 bytes; the limit for such files is 4"):
        read_bytes(tmp_path, "a", 4)
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", (1 << 30) + 1)  # without content on the disk
    with pytest.raises(CheckpointError, match=r"1073741825 bytes; the limit .* is 1073741824$"):
        read_bytes(tmp_path, "large")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder is a directory, not a regular file"):
        locate(tmp_path, "folder")
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path, "b")


def test_only_the_blobs_of_a_snapshot_may_be_outside_of_it(tmp_path):
    for place in ("snapshots", "others"):
        model = tmp_path / place
        (model / place / "a1").mkdir(parents=True)
        for folder in ("blobs", "blobs2"):
            (model / folder).mkdir()
            (model / folder / "b").write_bytes(b"1")
            (model / place / "a1" / folder).symlink_to(model / folder / "b")
    inside = tmp_path / "snapshots" / "snapshots" / "a1"
    assert locate(inside, "blobs") == (tmp_path / "snapshots" / "blobs" / "b").resolve()
    for folder, name in ((inside, "blobs2"), (tmp_path / "others" / "others" / "a1", "blobs")):
        with pytest.raises(CheckpointError, match="outside the folder"):
            locate(folder, name)


def test_descriptors_of_refused_files_are_closed(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is a pipe"):
        open_regular(tmp_path / "pipe")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"$float": "inf"}', float("inf")),
        ('{"$float": 3}', {"$float": 3}),
        ('{"$bytes": "YQ=="}', b"a"),
        ('{"$bytes": "YQ==", "x": 1}', {"$bytes": "YQ==", "x": 1}),
        ('{"$tuple": [1, [2]]}', (1, [2])),
        ('{"$dict": [[1, {"$tuple": []}]]}', {1: ()}),
        ("{}", {}),
    ],
)
def test_marked_objects_are_restored_only_in_their_exact_form(text, value):
    found = loads(text)
    assert found == value and type(found) is type(value)
