"""Which difference between a dataset, its index and its manifest `verify` names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_data import ByteTokenizer, DataError, IndexedDataset, preprocess, split, verify
from megatron_data import files as files_module


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A dataset of three documents, of which one is empty."""
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n{"text": "de"}\n')
    return preprocess([tmp_path / "a.jsonl"], tmp_path / "o", ByteTokenizer())[0].prefix


def change(prefix: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits the manifest of a dataset."""
    path = Path(f"{prefix}.meta.json")
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["bin", "idx"])
def test_sizes_and_contents_of_both_files_are_compared(dataset: str, name: str) -> None:
    size = Path(f"{dataset}.{name}").stat().st_size
    assert verify(dataset).has_manifest
    change(dataset, lambda m: m["files"][name].pop("blocks"))  # as in older manifests
    assert verify(dataset).has_manifest
    change(dataset, lambda m: m["files"][name].update(sha256="0" * 64))
    with pytest.raises(DataError, match=rf"\.{name} differs .* different content; copy it"):
        verify(dataset)
    change(dataset, lambda m: m["files"][name].update(bytes=size + 1))
    message = rf"\.{name} has {size} bytes, but its manifest has {size + 1}; copy it again"
    with pytest.raises(DataError, match=message):
        verify(dataset)


@pytest.mark.parametrize("count", ["documents", "empty_documents", "sequences", "tokens"])
def test_every_count_is_compared(dataset: str, count: str) -> None:
    change(dataset, lambda m: m["counts"].update({count: m["counts"][count] + 1}))
    with pytest.raises(DataError, match=r"holds \{.*\}, but its manifest has \{.*; prep"):
        verify(dataset)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size":257', '"size":257'),
        ('"vocab_size":257', '"vocab_size":null'),
        ('"vocab_size":257', '"vocab_size":"x"'),
        ('"vocab_size":257', '"vocab_size":1e999'),
        ('"files": {"bin":', '"files": {"bin":5,"was":'),
    ],
)
def test_a_manifest_with_missing_and_other_values_is_damaged(
    dataset: str, old: str, new: str
) -> None:
    path = Path(f"{dataset}.meta.json")
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=r"meta\.json is .*preprocess the text again|is not JSON"):
        verify(dataset)


def test_the_damaged_block_is_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "BLOCK_BYTES", 1 << 12)
    prefix = preprocess([corpus], tmp_path / "o", ByteTokenizer())[0].prefix
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    blocks = -(-len(data) // (1 << 12))
    manifest = json.loads(Path(f"{prefix}.meta.json").read_text())
    assert len(manifest["files"]["bin"]["blocks"]) == blocks > 5
    for place in (3 * 4096 + 5, 4 * 4096):
        data[place] = 255
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"\(2 of {blocks} blocks of 64 MiB, the first is 3\)"):
        verify(prefix)


def test_the_structure_of_an_index_is_checked_without_a_manifest_too(
    tmp_path: Path, write_dataset: Callable[..., str]
) -> None:
    prefix = write_dataset([[1, 2, 3], [4], [5, 6]])
    assert not verify(prefix).has_manifest
    index = Path(f"{prefix}.idx")
    with IndexedDataset(prefix) as dataset:
        pointer = dataset.sequence_pointers[1:2].tobytes()
    whole = index.read_bytes()
    assert whole.count(pointer) == 1
    index.write_bytes(whole.replace(pointer, bytes([2]) + pointer[1:]))
    message = "the pointer of sequence 1 is not the sum of the lengths before it"
    with pytest.raises(DataError, match=message):
        verify(prefix)
    with pytest.raises(DataError, match=message):
        split(prefix, [tmp_path / "a", tmp_path / "b"], documents=[1, 2])
    assert not list(tmp_path.glob("[ab].*"))
