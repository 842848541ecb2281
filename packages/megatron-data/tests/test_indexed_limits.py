"""Limits of the indexed format: bounds of reads, checks in blocks, headers, images, statistics."""

import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError, IndexedDataset, IndexedDatasetBuilder
from megatron_data.indexed import dataset_files, reader
from megatron_data.indexed.format import HEADER, Header
from megatron_data.indexed.images import count_images, image_format, text_mask, unpack_image
from megatron_data.indexed.inspection import (
    document_text,
    draw_histogram,
    draw_svg,
    summarize,
)

Write = Callable[..., str]
DOCUMENTS = [[10 * number + at for at in range(number)] for number in range(1, 6)]


@pytest.mark.parametrize("mapped", [True, False])
def test_reads_reach_to_the_end_of_a_sequence_and_no_further(
    write_dataset: Write, mapped: bool
) -> None:
    with IndexedDataset(write_dataset(DOCUMENTS), mmap=mapped) as dataset:
        for number, tokens in enumerate(DOCUMENTS):
            for offset in range(len(tokens) + 1):
                assert dataset.get(number, offset).tolist() == tokens[offset:]
                for length in range(len(tokens) - offset + 1):
                    found = dataset.get(number, offset, length).tolist()
                    assert found == tokens[offset : offset + length]
            for offset, length in ((-1, 1), (0, -1), (0, len(tokens) + 1), (len(tokens), 1)):
                with pytest.raises(IndexError, match=f"of sequence {number}, which has"):
                    dataset.get(number, offset, length)
            assert dataset.document(number).tolist() == tokens
            assert dataset.document(number - 5).tolist() == tokens
        for document in (5, -6):
            with pytest.raises(IndexError, match=f"document {document} of 5 in"):
                dataset.document(document)
        with pytest.raises(IndexError, match="sequence 5 of 5 in"):
            dataset.get(5)
        assert dataset.tokens_before(np.arange(6)).tolist() == [0, 1, 3, 6, 10, 15]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("block_bytes", [2, 6, 8, 1 << 20])
def test_a_scan_yields_any_range_in_blocks(
    write_dataset: Write, monkeypatch: pytest.MonkeyPatch, mapped: bool, block_bytes: int
) -> None:
    monkeypatch.setattr(dataset_files, "_BLOCK_BYTES", block_bytes)
    tokens = [token for document in DOCUMENTS for token in document]
    with IndexedDataset(write_dataset(DOCUMENTS), mmap=mapped) as dataset:
        for begin in range(16):
            for end in range(begin, 16):
                blocks = [block.tolist() for block in dataset.scan(begin, end)]
                assert [token for block in blocks for token in block] == tokens[begin:end]
                assert all(len(block) == block_bytes // 2 for block in blocks[:-1])
        assert sum(map(len, dataset.scan())) == 15
        for begin, end in ((-1, 2), (3, 2), (0, 16), (16, 16)):
            with pytest.raises(IndexError, match=f"tokens {begin} to {end} of 15 in"):
                dataset.scan(begin, end)


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_a_check_names_the_first_damage_wherever_it_is(
    write_dataset: Write, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(reader, "_CHECKED", block)
    prefix = write_dataset(DOCUMENTS)
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()

    def damaged(offset: int, value: bytes) -> str:
        path.write_bytes(whole[:offset] + value + whole[offset + len(value) :])
        with IndexedDataset(prefix) as dataset, pytest.raises(DataError) as raised:
            dataset.check()
        return str(raised.value)

    lengths, pointers, bounds = HEADER.size, HEADER.size + 5 * 4, HEADER.size + 5 * 12
    for number in range(4):  # the last length and pointer give the size of the file
        message = damaged(lengths + 4 * number, struct.pack("<i", -1))
        assert f"sequence {number} has length -1 (document {number})" in message
        message = damaged(pointers + 8 * number, struct.pack("<q", 1))
        expected = f"the pointer of sequence {number} is not the sum of the lengths before it"
        assert f"{expected} (document {number})" in message
    for number in range(1, 5):
        message = damaged(bounds + 8 * number, struct.pack("<q", number + 2))
        assert f"document {number} ends before it begins" in message
    last = struct.pack("<i", 6) + whole[pointers : bounds - 8] + struct.pack("<q", 2 * 9)
    message = damaged(pointers - 4, last)
    assert "the pointer of sequence 4 is not the sum of" in message and "(document 4)" in message
    path.write_bytes(whole)
    with IndexedDataset(prefix) as dataset:
        dataset.check()


def test_a_read_continues_where_a_short_one_ended(
    write_dataset: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 3), at))
    with IndexedDataset(write_dataset(DOCUMENTS), mmap=False) as dataset:
        assert [tokens.tolist() for tokens in dataset] == DOCUMENTS
        assert dataset.get(4, 1, 3).tolist() == DOCUMENTS[4][1:4]


def test_bounds_of_documents_run_from_0_to_the_number_of_sequences(write_dataset: Write) -> None:
    prefix = write_dataset(DOCUMENTS)
    path = Path(f"{prefix}.idx")
    whole = path.read_bytes()
    for at, value in ((HEADER.size + 60, 1), (len(whole) - 8, 4), (len(whole) - 8, 6)):
        path.write_bytes(whole[:at] + struct.pack("<q", value) + whole[at + 8 :])
        with pytest.raises(DataError, match="its document bounds do not run from 0 to 5"):
            IndexedDataset(prefix)
    path.write_bytes(Header(np.dtype("<u2"), 0, 0).pack())  # not even the leading 0
    with pytest.raises(DataError, match="its document bounds do not run from 0 to 0"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"MMIDIDX\0\0" + bytes(24), "a.idx has 33 bytes, but an index has at least 34"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\1", 1, 8, 0, 1), "it begins with b'MMIDIDX"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 8, 0, 1), "has version 2; this package"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 0, 8, 0, 1), "has version 0; this package"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 0, 0, 1), "type 0, but types are 1 to 8"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 9, 0, 1), "type 9, but types are 1 to 8"),
        (b"TNTIDX\0\0", "the format Megatron used before 2020"),
    ],
)
def test_headers_of_other_files_are_refused(header: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Header.unpack(header, "a.idx")


@pytest.mark.parametrize(
    ("code", "name"),
    [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (6, "<f8"), (7, "<f4"), (8, "<u2")],
)
def test_token_types_have_megatrons_codes(code: int, name: str) -> None:
    header = Header(np.dtype(name), 3, 2)
    packed = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 3, 2)
    assert header.pack() == packed
    assert Header.unpack(packed + b"more", "a.idx") == header
    # int32 lengths and int64 pointers of 3 sequences, 2 bounds, and 3 modes
    assert header.index_bytes(False) == 34 + 3 * 12 + 2 * 8
    assert header.index_bytes(True) == 34 + 3 * 12 + 2 * 8 + 3


@pytest.mark.parametrize(
    ("dtype", "fits", "wrong"),
    [
        ("uint16", [0, 65_535], [(-1, -1), (65_536, 65_536)]),
        ("int32", [-(2**31), 2**31 - 1], [(2**31, 2**31), (-(2**31) - 1, -(2**31) - 1)]),
        ("uint8", [0, 255], [(256, 256), (-1, -1)]),
    ],
)
def test_the_smallest_and_largest_token_of_a_type_are_written(
    tmp_path: Path, dtype: str, fits: list[int], wrong: list[tuple[int, int]]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", dtype) as builder:
        builder.add_document(fits, [2])
        for token, named in wrong:
            with pytest.raises(DataError, match=f"token {named} does not fit {dtype} in"):
                builder.add_document([1, token], [2])
        with pytest.raises(DataError, match="tokens of type float64 cannot be stored as"):
            builder.add_document([1.5], [1])
        builder.finalize()
    with IndexedDataset(tmp_path / "d") as dataset:
        assert dataset[0].tolist() == fits


def test_lengths_modes_and_documents_must_agree(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "int32", multimodal=True) as builder:
        for tokens, lengths, modes, message in (
            ([1, 2], [1], None, "2 tokens, but the sequence lengths sum to 1"),
            ([1, 2], [3, -1], None, "the length of a sequence is -1; give at least 0"),
            ([1, 2], [1, 1], [0], "2 sequences, but 1 modes are given"),
            ([1, 2], [1, 1], [0, 1, 0], "2 sequences, but 3 modes are given"),
        ):
            with pytest.raises(DataError, match=message):
                builder.add_document(tokens, lengths, modes)
        longest = 2**31 - 1
        for length, message in (
            (longest + 1, "a sequence has 2,147,483,648 tokens; the format allows at most 2,147"),
            (longest, "the length of a sequence is -2147483647; give at least 0"),
        ):
            with pytest.raises(DataError, match=message):
                builder.add_documents([], np.array([length, -length]), np.array([2]))
        with pytest.raises(DataError, match="the documents have 3 sequences, but 2 lengths are"):
            builder.add_documents([1, 2], np.array([1, 1]), np.array([1, 2]))
        builder.add_item([7, 8, 9])
        builder.add_item([0, 5], mode=1)
        with pytest.raises(DataError, match="2 sequences at the end in no document; call"):
            builder.finalize()
        builder.end_document()
        builder.add_document([], [])
        written = builder.finalize()
    assert written[2:] == (2, 2, 3, 1, 8)  # documents, sequences, tokens, images and their bytes
    with IndexedDataset(tmp_path / "d") as dataset:
        assert dataset.sequence_modes is not None
        assert dataset.sequence_modes.tolist() == [0, 1]
        text, others = document_text(dataset, 0)
        assert (text.tolist(), others) == ([7, 8, 9], 1)
        assert document_text(dataset, 1)[0].tolist() == []
        found = summarize(dataset)
    assert found.document_lengths.tolist() == [3, 0]
    assert found.counts.to_json() == {
        "documents": 2, "empty_documents": 1, "sequences": 2, "tokens": 3, "images": 1,
        "image_bytes": 8,
    }  # fmt: skip
    assert found.distinct_tokens == 3 and len(found.token_counts) == 10
    assert count_images(np.array([3, 2, 4]), np.array([0, 1, 1], np.int8)) == (2, 6)


def test_sequences_are_text_unless_modes_are_given(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "int32", multimodal=True) as builder:
        builder.add_document([1, 2, 3], [1, 2])
        builder.add_documents([4, 5], np.array([1, 1]), np.array([2]))
        builder.add_item([6])
        builder.end_document()
        written = builder.finalize()
    assert written[2:] == (3, 5, 6, 0, 0)  # documents, sequences, tokens; no images
    with IndexedDataset(tmp_path / "d") as dataset:
        assert dataset.sequence_modes is not None
        assert dataset.sequence_modes.tolist() == [0] * 5
        name = f"IndexedDataset({str(tmp_path / 'd')!r}: "
        assert repr(dataset) == f"{name}5 sequences, int32)"
    assert repr(dataset) == f"{name}closed)"


def test_statistics_count_token_ids_and_refuse_other_numbers(write_dataset: Write) -> None:
    with IndexedDataset(write_dataset([[3, 1, 3], [], [0, 3, 1]])) as dataset:
        found = summarize(dataset)
        assert text_mask(dataset, 1, 3).tolist() == [True, True]
        assert document_text(dataset, 2)[0].tolist() == [0, 3, 1]
    assert found.token_counts.tolist() == [1, 2, 0, 3]
    with IndexedDataset(write_dataset([[]], "none")) as dataset:
        assert summarize(dataset).token_counts.tolist() == []
    assert found.most_common(2) == [(3, 3), (1, 2)]
    assert found.distinct_tokens == 3
    assert found.document_lengths.tolist() == [3, 0, 3]
    for tokens, dtype, message in (
        ([1, -1], "int32", "holds negative numbers, which are not token ids"),
        ([1.0], "float32", "holds float32, which cannot be token ids"),
    ):
        with (
            IndexedDataset(write_dataset([tokens], dtype, dtype)) as wrong,  # type: ignore[list-item]
            pytest.raises(DataError, match=message),
        ):
            summarize(wrong)


@pytest.mark.parametrize(
    ("values", "width", "blocks", "rows"),
    [
        ([0, 0, 1], 4, False, [("0", "####", 2), ("1", "##", 1)]),
        ([1, 2, 3, 9], 4, False,
         [("1", "##", 1), ("2 to 3", "####", 2), ("4 to 7", "", 0), ("8 to 15", "##", 1)]),
        ([5] * 3 + [8], 2, True, [("4 to 7", "██", 3), ("8 to 15", "▋", 1)]),  # 16/3 eighths
        ([1] * 1000 + [2], 3, True, [("1", "███", 1000), ("2 to 3", "▏", 1)]),
        ([1] * 1000 + [2], 3, False, [("1", "###", 1000), ("2 to 3", "#", 1)]),
        ([1024], 3, False, [("1,024 to 2,047", "###", 1)]),
        ([], 3, True, [("0", "", 0)]),
    ],
)  # fmt: skip
def test_a_histogram_by_hand(
    values: list[int], width: int, blocks: bool, rows: list[tuple[str, str, int]]
) -> None:
    drawn = draw_histogram(np.array(values, np.int64), width, blocks)
    assert drawn.splitlines() == [f"{name:>24} {bar} {count:,}" for name, bar, count in rows]


def test_a_drawn_histogram_has_a_bar_of_the_right_length_for_each_count() -> None:
    drawn = draw_svg(np.array([1, 2, 3, 2, 9]), "a & b")
    assert ">a &amp; b<" in drawn and f'height="{40 + 22 * 4}"' in drawn
    bars = re.findall(r'<rect x="200" y="(\d+)" width="([\d.]+)" height="16"', drawn)
    assert [(int(y), float(width)) for y, width in bars] == [
        (42, 146.7), (64, 440.0), (86, 0.0), (108, 146.7),
    ]  # fmt: skip
    texts = re.findall(r'<text x="([\d.]+)" y="(\d+)">([\d,]+)</text>', drawn)
    assert [(float(x), int(y), n) for x, y, n in texts] == [
        (352.7, 54, "1"), (646.0, 76, "3"), (206.0, 98, "0"), (352.7, 120, "1"),
    ]  # fmt: skip
    names = re.findall(r'<text x="190" y="(\d+)" text-anchor="end">([^<]+)<', drawn)
    assert names == [("54", "1"), ("76", "2 to 3"), ("98", "4 to 7"), ("120", "8 to 15")]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"GIF87a", "GIF"),
        (b"GIF89a", "GIF"),
        (b"BM", "BMP"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"RIFF\1\2\3\4WEBP", "WebP"),
        (b"RIFF\1\2\3\4WAVE", None),
        (b"RIFX\1\2\3\4WEBP", None),
        (b"GIF88a", None),
        (b"", None),
    ],
)
def test_images_are_known_by_their_first_bytes(data: bytes, kind: str | None) -> None:
    assert image_format(data) == kind


@pytest.mark.parametrize("padding", [-1, 0, 1, 3, 4])
def test_an_image_begins_with_its_padding_of_0_to_3_bytes(padding: int) -> None:
    sequence = np.array([padding, 0x64636261], np.int32)
    if 0 <= padding <= 3:
        assert unpack_image(sequence) == b"abcd"[: 4 - padding]
        return
    with pytest.raises(DataError, match=f"that begins with {padding} is not an image"):
        unpack_image(sequence)
    for other, what in (
        (sequence[:0], "int32 that is empty"),
        (sequence % 4 * 1.0, "float64 that"),
    ):
        with pytest.raises(DataError, match=f"a sequence of {what}"):
            unpack_image(other)


def test_an_image_is_int32_and_not_empty() -> None:
    for data, dtype, what in (
        ([], "int32", "int32 that is empty"),
        ([0, 5], "int64", "int64 that"),
    ):
        with pytest.raises(DataError, match=f"a sequence of {what}"):
            unpack_image(np.array(data, dtype))


@pytest.mark.parametrize("text_first", [True, False])
def test_datasets_with_and_without_images_are_not_joined(
    write_dataset: Write, tmp_path: Path, text_first: bool
) -> None:
    text = write_dataset([[1, 2]], "text", "int32")
    with IndexedDatasetBuilder(tmp_path / "image", "int32", multimodal=True) as builder:
        builder.add_document([0, 5], [2], [1])
        builder.finalize()
    added, empty = (tmp_path / "image", write_dataset([], "none", "int32"))
    with IndexedDatasetBuilder(tmp_path / "d", "int32", multimodal=not text_first) as builder:
        builder.add_index(empty)  # has no sequence, so no mode is missing
        with pytest.raises(DataError, match="only one of them is multimodal"):
            builder.add_index(added if text_first else text)


def missing(tmp_path: Path, name: str, others: Sequence[str] = ()) -> str:
    for other in others:
        (tmp_path / other).touch()
    with pytest.raises(DataError) as raised:
        IndexedDataset(str(tmp_path / name))
    return str(raised.value)


def test_the_remedy_for_a_missing_dataset_follows_from_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing(tmp_path, "a").endswith("missing; preprocess the text first")
    assert missing(tmp_path, "a.bin").endswith(f"without .bin: {tmp_path}/a")
    assert "the other file exists" in missing(tmp_path, "b", ["b.bin"])
    assert "the prefix of a loss mask" in missing(tmp_path, "c_loss")
    assert "is not the prefix of a dataset; if it is text" in missing(tmp_path, "d", ["d"])
    for end in ("_text_document", "_text_sentence", "_conversation", "_image_text"):
        found: Any = missing(tmp_path, f"e{end[1]}{end[-1]}", [f"e{end[1]}{end[-1]}{end}.idx"])
        assert found.endswith(f"{end}?")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"if 0\.5 is a weight, give WEIGHT PREFIX pairs"):
        IndexedDataset("0.5")
