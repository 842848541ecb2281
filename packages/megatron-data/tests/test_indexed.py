"""Indexed datasets: files written by hand, and every kind of damage."""

import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import DataError, IndexedDataset, IndexedDatasetBuilder
from megatron_data.indexed import choose_dtype, reader

Write = Callable[..., str]


def index_by_hand(code: int = 8, itemsize: int = 2) -> bytes:
    """Returns an index of sequences of 3, 1 and 2 tokens; documents (0, 1), () and (2)."""
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QB", 1, code)
        + struct.pack("<QQ", 3, 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 3 * itemsize, 4 * itemsize)
        + struct.pack("<4q", 0, 2, 2, 3)
    )


TOKENS_BY_HAND = struct.pack("<6H", 10, 11, 12, 20, 30, 65_535)


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    (tmp_path / "d.idx").write_bytes(index_by_hand())
    (tmp_path / "d.bin").write_bytes(TOKENS_BY_HAND)
    return tmp_path / "d"


def test_reads_bytes_made_by_hand(by_hand: Path) -> None:
    with IndexedDataset(by_hand) as dataset:
        dataset.check()
        assert (len(dataset), dataset.num_documents, dataset.dtype) == (3, 3, np.uint16)
        assert [dataset[i].tolist() for i in range(3)] == [[10, 11, 12], [20], [30, 65_535]]
        assert dataset[-1].tolist() == [30, 65_535]
        assert [dataset.document(i).tolist() for i in range(3)] == [
            [10, 11, 12, 20],
            [],
            [30, 65_535],
        ]
        assert dataset.get(0, 1).tolist() == [11, 12]
        assert dataset.get(0, 1, 1).tolist() == [11]
        assert dataset.document_indices.tolist() == [0, 2, 2, 3]
        assert dataset.sequence_modes is None


def test_writes_bytes_made_by_hand(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        builder.add_item([10, 11, 12])
        builder.add_item([20])
        builder.end_document()
        builder.add_document([], [])
        builder.add_document([30, 65_535], [2])
        written = builder.finalize()
    assert (tmp_path / "d.idx").read_bytes() == index_by_hand()
    assert (tmp_path / "d.bin").read_bytes() == TOKENS_BY_HAND
    assert (written.documents, written.sequences, written.tokens) == (3, 3, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_many_documents_at_once_equal_one_by_one(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        tokens = np.array([10, 11, 12, 20, 30, 65_535])
        builder.add_documents(tokens, np.array([3, 1, 2]), np.array([2, 0, 1]))
        builder.finalize()
    assert (tmp_path / "d.idx").read_bytes() == index_by_hand()


def test_any_number_of_modes_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.idx").write_bytes(index_by_hand() + bytes([0, 1, 0]))
    (tmp_path / "d.bin").write_bytes(TOKENS_BY_HAND)
    modes = IndexedDataset(tmp_path / "d").sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0]


def test_an_empty_dataset_round_trips(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "d")
    dataset.check()
    assert (len(dataset), dataset.num_documents, len(dataset.tokens)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint16"), (65_499, "uint16"), (65_500, "int32"), (65_536, "int32"), (70_000, "int32")],
)
def test_token_type_by_vocabulary(vocab_size: int, dtype: str) -> None:
    assert choose_dtype(vocab_size) == np.dtype(dtype)


def test_vocabularies_from_65500_to_65536_are_read_with_any_token_type(
    write_dataset: Write,
) -> None:
    """One of Megatron's loading paths decodes int32 files of such vocabularies as uint16."""
    for dtype in ("uint16", "int32"):
        prefix = write_dataset([[65_535, 1, 65_500]], dtype, dtype)
        assert IndexedDataset(prefix)[0].tolist() == [65_535, 1, 65_500]


def test_appending_a_dataset_keeps_its_documents(write_dataset: Write, tmp_path: Path) -> None:
    first, second = write_dataset([[1, 2], [3]], "a"), write_dataset([[4], [5, 6]], "b")
    with IndexedDatasetBuilder(tmp_path / "c", "uint16") as builder:
        builder.add_index(first)
        builder.add_index(second)
        builder.finalize()
    merged = IndexedDataset(tmp_path / "c")
    merged.check()
    assert [merged.document(i).tolist() for i in range(4)] == [[1, 2], [3], [4], [5, 6]]
    with (
        IndexedDatasetBuilder(tmp_path / "e", "int32") as builder,
        pytest.raises(DataError, match=r"a \(uint16\) to .*e \(int32\)"),
    ):
        builder.add_index(first)


def test_views_outlive_the_dataset_and_closed_datasets_refuse(write_dataset: Write) -> None:
    dataset = IndexedDataset(write_dataset([[1, 2, 3]]))
    view = dataset[0]
    dataset.close()
    assert view.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5
    with pytest.raises(DataError, match="closed"):
        _ = dataset.tokens


def test_unpickling_opens_the_files_again(write_dataset: Write) -> None:
    dataset = pickle.loads(pickle.dumps(IndexedDataset(write_dataset([[1, 2, 3]]))))
    assert dataset[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 4), (2, 2), (4, None), (0, -1)])
def test_a_range_outside_the_sequence_is_refused(
    by_hand: Path, offset: int, length: int | None
) -> None:
    with pytest.raises(IndexError, match="sequence 0, which has 3"):
        IndexedDataset(by_hand).get(0, offset, length)


def test_an_index_that_does_not_match_its_bin_names_both_sizes(by_hand: Path) -> None:
    for data in (TOKENS_BY_HAND[:-2], TOKENS_BY_HAND + b"\x00\x00"):
        by_hand.with_suffix(".bin").write_bytes(data)
        message = rf"d\.idx does not match .*d\.bin.* 12 bytes.* {len(data)};"
        with pytest.raises(DataError, match=message):
            IndexedDataset(by_hand)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "has 0 bytes"),
        (lambda data: data[:20], "has 20 bytes"),
        (lambda data: b"TNTIDX\x00\x00" + data[8:], "TNTIDX"),
        (lambda data: b"PK\x03\x04" + data[4:], "is not the index"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "version 2"),
        (lambda data: data[:17] + b"\x09" + data[18:], "token type 9"),
        (lambda data: data[:-1], "101 bytes, but its header .* requires 102"),
        (lambda data: data + b"\x00", "requires 102"),
        (lambda data: data[:18] + struct.pack("<Q", 2**62) + data[26:], "requires"),
        (lambda data: data[:-8] + struct.pack("<q", 2), "document bounds"),
        (lambda data: index_by_hand(code=4, itemsize=4), "describes 24 bytes, but the .bin has 12"),
    ],
)
def test_a_damaged_index_is_named(
    by_hand: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = by_hand.with_suffix(".idx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as raised:
        IndexedDataset(by_hand)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (34, struct.pack("<i", -3), "sequence 0 has length -3"),
        (34, struct.pack("<i", 4), "pointer of sequence 1"),
        (46, struct.pack("<q", 2), "pointer of sequence 0"),
        (78, struct.pack("<q", 9), "document 1 ends before it begins"),
    ],
)
def test_check_finds_damage_in_the_middle(
    by_hand: Path, offset: int, value: bytes, message: str
) -> None:
    path = by_hand.with_suffix(".idx")
    data = path.read_bytes()
    path.write_bytes(data[:offset] + value + data[offset + len(value) :])
    with pytest.raises(DataError, match=message):
        IndexedDataset(by_hand).check()


@pytest.mark.parametrize("mapped", [True, False])
def test_a_pointer_before_the_file_is_named(by_hand: Path, mapped: bool) -> None:
    path = by_hand.with_suffix(".idx")
    data = path.read_bytes()
    pointers = 34 + 4 * len(IndexedDataset(by_hand))
    path.write_bytes(data[:pointers] + struct.pack("<q", -2) + data[pointers + 8 :])
    with pytest.raises(DataError, match=r"points to byte -2 of a \.bin of 12 bytes"):
        IndexedDataset(by_hand, mmap=mapped).get(0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_flipped_bytes_crash_the_reader(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    index = bytearray(index_by_hand())
    for _ in range(data.draw(st.integers(1, 4))):
        index[data.draw(st.integers(0, len(index) - 1))] = data.draw(st.integers(0, 255))
    (folder / "d.idx").write_bytes(index)
    (folder / "d.bin").write_bytes(TOKENS_BY_HAND)
    try:
        dataset = IndexedDataset(folder / "d")
        for sequence in range(len(dataset)):
            dataset.get(sequence).sum()
        dataset.check()
    except (DataError, IndexError):
        return
    assert len(dataset.tokens) * dataset.dtype.itemsize == len(TOKENS_BY_HAND)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("d.bin", "without .bin: .*d$"), ("d.idx", "without .idx"), ("nothing", "preprocess")],
)
def test_the_error_for_a_missing_dataset_names_the_remedy(
    by_hand: Path, name: str, hint: str
) -> None:
    with pytest.raises(DataError, match=hint):
        IndexedDataset(by_hand.parent / name)


def test_a_dataset_with_one_file_is_refused(by_hand: Path) -> None:
    by_hand.with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"d\.idx missing; the other file exists"):
        IndexedDataset(by_hand)


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        with pytest.raises(DataError, match="token 65536 does not fit uint16"):
            builder.add_item([1, 65_536])
        with pytest.raises(DataError, match="token -1 does not fit"):
            builder.add_item([-1])
        with pytest.raises(DataError, match="float64 cannot be stored"):
            builder.add_item([0.5])
        with pytest.raises(DataError, match="3 tokens, but the sequence lengths sum to 4"):
            builder.add_document([1, 2, 3], [2, 2])
        builder.add_item([1])
        with pytest.raises(DataError, match="call end_document"):
            builder.finalize()
    with pytest.raises(DataError, match="cannot hold uint32"):
        IndexedDatasetBuilder(tmp_path / "d", "uint32")


def test_a_failed_build_preserves_the_old_dataset(write_dataset: Write, tmp_path: Path) -> None:
    prefix = write_dataset([[1, 2, 3]])

    def fail() -> None:
        with IndexedDatasetBuilder(prefix, "uint16") as builder:
            builder.add_document([7] * 100, [100])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_a_second_writer_of_the_same_prefix_is_refused(tmp_path: Path) -> None:
    with (
        IndexedDatasetBuilder(tmp_path / "d"),
        pytest.raises(DataError, match="another process is writing"),
    ):
        IndexedDatasetBuilder(tmp_path / "d")
    with IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.finalize()


def test_a_file_reads_the_same_without_a_memory_map(write_dataset: Write) -> None:
    documents = [[i + j for j in range(i % 7)] for i in range(50)]
    prefix = write_dataset(documents)
    with IndexedDataset(prefix) as whole, IndexedDataset(prefix, mmap=False) as parts:
        for dataset in (parts, pickle.loads(pickle.dumps(parts))):
            for number in range(50):
                assert dataset[number].tolist() == documents[number]
                assert dataset[number].dtype == whole[number].dtype
            assert dataset.get(6, 2, 3).tolist() == documents[6][2:5]
        with pytest.raises(DataError, match="is not memory-mapped"):
            parts.tokens  # noqa: B018
        Path(f"{prefix}.bin").write_bytes(b"ab")  # truncated while it is open
        with pytest.raises(DataError, match=r"points to byte .*megatron-data verify"):
            parts.get(48)
    with pytest.raises(DataError, match="is closed"):
        parts.get(0)


@pytest.mark.slow
def test_memory_is_constant_for_twenty_gigabytes(tmp_path: Path) -> None:
    """The 20 GB are a hole, which takes no disk space. Long documents keep the index small."""
    code = f"""
import numpy as np, os, re
from pathlib import Path
from megatron_data import build_gpt_datasets
from megatron_data.indexed.format import DTYPES, Header
documents, length = 10_000, 1_000_000
with open({str(tmp_path / "d.idx")!r}, "wb") as index:
    index.write(Header(DTYPES[8], documents, documents + 1).pack())
    np.full(documents, length, "<i4").tofile(index)
    (np.arange(documents, dtype="<i8") * (2 * length)).tofile(index)
    np.arange(documents + 1, dtype="<i8").tofile(index)
Path({str(tmp_path / "d.bin")!r}).touch()
os.truncate({str(tmp_path / "d.bin")!r}, 2 * documents * length)
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
prefix = {str(tmp_path / "d")!r}
train = build_gpt_datasets(prefix, "1,0,0", sequence_length=2048, mmap=False).train
numbers = np.random.default_rng(0).integers(0, len(train), 100_000).tolist()
sizes = []
for place, number in enumerate(numbers):
    train[number]
    if place % 10_000 == 100:
        sizes.append(resident())
print(sizes)
assert max(sizes) - sizes[0] < 8, sizes
assert sizes[0] < 200, sizes
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("checked", [1, 3, 7, 100])
def test_the_index_is_checked_in_blocks(
    write_dataset: Write, checked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_CHECKED", checked)
    prefix = write_dataset([[5] * (1 + i % 4) for i in range(20)])
    with IndexedDataset(prefix) as dataset:
        dataset.check()
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for offset, what in (
        (34 + 4 * 13, "sequence 13 has length"),
        (34 + 80 + 8 * 13, "sequence 13"),
    ):
        damaged = bytearray(whole)
        damaged[offset : offset + 4] = struct.pack("<i", -7)
        index.write_bytes(damaged)
        with IndexedDataset(prefix) as dataset, pytest.raises(DataError, match=what):
            dataset.check()


def test_an_old_index_is_never_beside_new_tokens(
    write_dataset: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, seen, replace = write_dataset([[1, 2]]), [], Path.replace

    def watched(path: Path, target: Path) -> Path:
        seen.append((target.name, Path(f"{prefix}.idx").exists()))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    write_dataset([[3]])
    assert seen == [("d.bin", False), ("d.idx", False)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mapped", [True, False])
def test_a_closed_dataset_holds_no_file(write_dataset: Write, mapped: bool) -> None:
    prefix, folder = write_dataset([[1, 2, 3]]), Path("/proc/self/fd")

    def held() -> tuple[bool, bool]:
        opened = [str(one.readlink()) for one in folder.iterdir() if one.is_symlink()]
        return f"{prefix}." in Path("/proc/self/maps").read_text(), f"{prefix}.bin" in opened

    dataset = IndexedDataset(prefix, mmap=mapped)
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert held() == (True, True)  # the index is mapped in both cases
    dataset.close()
    assert held() == (False, False)
    assert (len(dataset), dataset.num_documents) == (0, 0)
