"""Tests of the files and hosts that paths of users and paths in data may open."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from megatron_data import DataError, preprocess, read_texts
from megatron_data.cli import main
from megatron_data.order.cache import load_or_build
from megatron_data.preprocessing import tokenize_image_pairs, trace
from megatron_data.sources import opening
from megatron_data.sources.storage import list_files
from megatron_data.tokenizers import NullTokenizer

pytest.importorskip("fsspec", reason="URLs are an extra of this package")

GIF = b"GIF89a" + bytes(20)
CHAINS = [
    "reference://::file:///etc/passwd",
    "simplecache::s3://bucket/a",
    "s3://bucket/a::file:///etc/passwd",
]
OTHERS = ["ftp://host/a", "sftp://host/a", "reference://x", "github://a:b@/c", "data:,x://y", "://"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the URLs that fsspec is asked to open; opens none."""
    import fsspec

    seen: list[str] = []

    def refuse(url: str, **options: Any) -> Any:
        seen.append(url)
        raise FileNotFoundError(url)

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    return seen


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[[object], str]:
    """Writes a dataset whose manifest names a source."""

    def write(path: object, **record: object) -> str:
        lines = tmp_path / "a.jsonl"
        lines.write_text('{"text": "1 2"}\n')
        prefix = preprocess([lines], tmp_path / "o", NullTokenizer(9))[0].prefix
        manifest = json.loads(Path(f"{prefix}.meta.json").read_text())
        manifest["sources"][0] |= {"path": path, **record}
        Path(f"{prefix}.meta.json").write_text(json.dumps(manifest))
        return prefix

    return write


@pytest.mark.parametrize("url", [*CHAINS, *OTHERS])
def test_a_source_in_a_manifest_cannot_use_other_schemes(
    url: str, dataset: Callable[..., str], opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", dataset(url), "0"]) == 0
    assert "the exact location is unknown: " in (shown := capsys.readouterr().out)
    assert "is not supported" in shown
    found = trace(dataset("a", parallel=[{"path": url}, {"path": url}]), document=0)
    assert "is not supported" in str(found.inexact_reason)
    assert not opened


def test_a_manifest_names_a_web_server_only_if_allowed(
    dataset: Callable[..., str], opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = dataset("https://host/a.jsonl")
    assert main(["trace", prefix, "0"]) == 0
    assert "give --allow-http" in capsys.readouterr().out
    assert not opened
    assert main(["trace", prefix, "0", "--allow-http"]) == 0
    assert set(opened) == {"https://host/a.jsonl"}
    trace(dataset("s3://bucket/a.jsonl"), document=0)
    assert opened[-1] == "s3://bucket/a.jsonl", "object storage needs no leave"


def test_a_source_in_a_manifest_is_not_a_pattern(
    dataset: Callable[..., str], tmp_path: Path
) -> None:
    found = trace(dataset(f"{tmp_path}/*.jsonl"), document=0)
    assert "no input file or folder at" in str(found.inexact_reason)


def test_the_listing_of_a_folder_in_a_manifest_is_limited(
    dataset: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that names the root does not cause a walk of the disk."""
    visited = []
    walk = os.walk

    def counting(*arguments: Any, **options: Any) -> Any:
        for each in walk(*arguments, **options):
            visited.append(each)
            yield each

    monkeypatch.setattr(os, "walk", counting)
    for number in range(40):
        (tmp_path / "deep" / str(number)).mkdir(parents=True)
        (tmp_path / "deep" / str(number) / "a.txt").write_text("1 2")
    monkeypatch.setattr(opening, "_OTHER_ENTRIES", 10)
    found = trace(dataset(f"{tmp_path}/deep"), document=0)
    assert found.inexact_reason == f"{tmp_path}/deep is a folder; the source was a file"
    assert not visited
    for place in (f"{tmp_path}/deep", f"file://{tmp_path}/deep"):
        found = trace(dataset(place, files=3), document=0)
        assert found.inexact_reason == f"{place} holds more than 16 files and folders"
        assert len(visited) < 3
    with monkeypatch.context() as patch:  # a manifest may name any number of files
        patch.setattr(opening, "_MAX_ENTRIES", 4)
        found = trace(dataset(f"{tmp_path}/deep", files=10**12), document=0)
        assert found.inexact_reason == f"{tmp_path}/deep holds more than 14 files and folders"
    assert "has changed" in str(
        trace(dataset(f"{tmp_path}/deep", files=40), document=0).inexact_reason
    )


@pytest.mark.parametrize("name", [5, None, "", "a\0b", "\ud800", ["a"]])
def test_invalid_paths_are_refused(name: object, dataset: Callable[..., str]) -> None:
    from megatron_data.sources.urls import check_untrusted_path

    with pytest.raises(DataError, match="is not a path or URL"):
        check_untrusted_path(name)
    unnameable = trace(dataset("a" * 5000), document=0).inexact_reason
    assert "File name too long" in str(unnameable)
    if name != "\ud800":  # not valid in JSON
        assert "is not a path or URL" in str(trace(dataset(name), document=0).inexact_reason)


def test_allowed_paths() -> None:
    from megatron_data.sources.urls import (
        HTTP_SCHEMES,
        STORAGE_SCHEMES,
        check_scheme,
        check_untrusted_path,
    )

    for scheme in (*STORAGE_SCHEMES, *HTTP_SCHEMES):
        check_scheme(f"{scheme}://a/b")
    for name in ("/a", "../a", "a::b", *(f"{scheme}://a" for scheme in STORAGE_SCHEMES)):
        assert check_untrusted_path(name) == name
    for url in (*CHAINS, *OTHERS):
        with pytest.raises(DataError, match="is not supported"):
            list(read_texts([url]))


@pytest.mark.parametrize("name", [*CHAINS, *OTHERS[:3]])
def test_a_line_cannot_name_an_image_with_another_scheme(
    name: str, tmp_path: Path, opened: list[str]
) -> None:
    lines = tmp_path / "a.jsonl"
    (tmp_path / "b.gif").write_bytes(GIF)
    rows = [{"text": "1", "image": name}, {"text": "2", "image": "b.gif"}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .* is not supported"):
        tokenize_image_pairs([lines], tmp_path / "o", NullTokenizer(9))
    report = tokenize_image_pairs([lines], tmp_path / "o", NullTokenizer(9), on_error="skip")
    assert (report.pairs, report.dataset.skipped.kinds) == (1, {"image": 1})
    assert not opened


def test_a_line_names_a_web_server_only_if_allowed(tmp_path: Path, opened: list[str]) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": "1", "image": "https://host/a.gif"}))
    arguments = ([lines], tmp_path / "o", NullTokenizer(9))
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: .*/a\.gif' is named by the data, .*--allow-ht"
    ):
        tokenize_image_pairs(*arguments)
    assert not opened
    with pytest.raises(DataError, match=r"there is no image https://host/a\.gif"):
        tokenize_image_pairs(*arguments, allow_http=True)
    assert set(opened) == {"https://host/a.gif"}


def test_pipes_and_devices_are_refused(tmp_path: Path, dataset: Callable[..., str]) -> None:
    """A pipe would block, and a device may never end."""
    pipe, lines = tmp_path / "pipe.gif", tmp_path / "b.jsonl"
    os.mkfifo(pipe)
    for name in (str(pipe), "/dev/zero", f"file://{pipe}"):
        lines.write_text(json.dumps({"text": "1", "image": name}))
        with pytest.raises(DataError, match=r"b\.jsonl:1: .* is a device or a pipe"):
            tokenize_image_pairs([lines], tmp_path / "o", NullTokenizer(9))
        assert trace(dataset(name), document=0).inexact_reason
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts" / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt is a device or a pipe"):
        list(read_texts([tmp_path / "texts"]))
    read_end, write_end = os.pipe()
    os.write(write_end, b'{"text": "a"}\n')
    os.close(write_end)
    with pytest.raises(DataError, match=rf"/dev/fd/{read_end} is a device or a pipe; write"):
        list(read_texts([f"/dev/fd/{read_end}"]))
    os.close(read_end)


def test_a_large_image_is_not_read(tmp_path: Path) -> None:
    image, lines = tmp_path / "a.gif", tmp_path / "a.jsonl"
    image.write_bytes(GIF)
    lines.write_text(json.dumps({"text": "1", "image": "a.gif"}))
    arguments = ([lines], tmp_path / "o", NullTokenizer(9))
    with pytest.raises(DataError, match=r"a\.gif has 26 bytes, more than --max-image-bytes 25"):
        tokenize_image_pairs(*arguments, max_image_bytes=25)
    with pytest.raises(DataError, match="--max-image-bytes 0; give at least 1"):
        tokenize_image_pairs(*arguments, max_image_bytes=0)
    os.truncate(image, 1 << 33)
    with pytest.raises(DataError, match=r"has 8,589,934,592 bytes, more than --max-image-bytes"):
        tokenize_image_pairs(*arguments)


@pytest.mark.parametrize("name", ["../../other/a", "/{folder}/other/a", "..", "a/b"])
def test_a_cached_order_cannot_name_other_files(name: str, tmp_path: Path) -> None:
    def build() -> dict[str, "np.ndarray[Any, Any]"]:
        return {"a": np.array([3])}

    load_or_build(tmp_path / "cache", "key", build)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other" / "a.npy", np.array([2]))
    listing = tmp_path / "cache" / "key" / "entry.json"
    whole = listing.read_bytes()
    path = name.format(folder=str(tmp_path)[1:])
    listing.write_bytes(orjson.dumps([f"{path}.npy"]))
    assert load_or_build(tmp_path / "cache", "key", build)["a"].tolist() == [3]
    assert listing.read_bytes() == whole, "the entry was made anew"
    named = {path: orjson.loads(whole)["arrays"]["a"]}
    digest = hashlib.sha256(orjson.dumps(["key", named])).hexdigest()
    listing.write_bytes(orjson.dumps({"arrays": named, "sha256": digest}))
    assert load_or_build(tmp_path / "cache", "key", build)["a"].tolist() == [3]
    assert listing.read_bytes() == whole


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_listing_has_at_most_as_many_files_and_folders_as_asked_for(
    tmp_path: Path, scheme: str
) -> None:
    for name in ("b.txt", "a.txt", "d/c.txt", ".hidden/e.txt", "d/.f.txt", ".g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    folder = f"{scheme}{tmp_path}"
    wanted = [f"{folder}/{name}" for name in ("a.txt", "b.txt", "d/c.txt")]
    for most in (None, 5, 4):  # three files and a folder
        assert list_files(folder, most) == wanted
    with pytest.raises(DataError, match=f"{folder} holds more than 3 files and folders"):
        list_files(folder, 3)
