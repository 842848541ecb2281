"""Tests of pairs of texts and images: bytes of images, and invalid pairs."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    IndexedDataset,
    build_gpt_datasets,
    merge,
    verify,
)
from megatron_data.cli import main
from megatron_data.indexed import pack_image, unpack_image
from megatron_data.indexed.images import image_format
from megatron_data.preprocessing import tokenize_image_pairs
from megatron_data.tokenizers import NullTokenizer

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00 anything\xff\xd9"
GIF = b"GIF89a\x01\x00\x01\x00\x80\xff\xff\xff"
IMAGES = {"a.png": PNG, "deep/b.jpg": JPEG, "c": GIF}
TEXTS = ["a whale", "", "über"]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    for name, data in IMAGES.items():
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(data)
    rows = [{"text": text, "image": name} for text, name in zip(TEXTS, IMAGES, strict=True)]
    lines = tmp_path / "images" / "pairs.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lines


@pytest.mark.parametrize("size", range(9))
def test_packed_images_of_any_size_are_unpacked(size: int) -> None:
    data = bytes(range(250, 250 + min(size, 6))) + bytes(max(size - 6, 0))
    packed = pack_image(data)
    assert (packed.dtype, packed[0]) == (np.dtype("int32"), -size % 4)
    assert packed[1:].tobytes() == data + bytes(-size % 4)
    assert unpack_image(packed) == data


def test_invalid_images_are_refused() -> None:
    for sequence in ([], [4, 1], [-1, 0]):
        with pytest.raises(DataError, match="is not an image"):
            unpack_image(np.array(sequence, np.int32))
    with pytest.raises(DataError, match="uint16 that begins with 1 is not an image"):
        unpack_image(np.array([1, 2], np.uint16))
    kinds = [image_format(begin) for begin in (PNG, JPEG, GIF, b"BM6", b"II*\0", b"MM\0*")]
    assert kinds == ["PNG", "JPEG", "GIF", "BMP", "TIFF", "TIFF"]
    assert image_format(b"RIFF\x10\0\0\0WEBPVP8 ") == "WebP"
    assert [image_format(begin) for begin in (b"", b"RIFF\x10\0\0\0WAVE", b"<html>")] == [None] * 3


def test_a_document_is_a_text_and_its_image(pairs: Path, tmp_path: Path) -> None:
    report = tokenize_image_pairs([pairs], tmp_path / "o", ByteTokenizer(), append_eod=True)
    sizes = sum(map(len, IMAGES.values()))
    assert (report.pairs, report.tokens, report.image_bytes) == (3, 15, sizes)
    with IndexedDataset(report.prefix) as dataset:
        dataset.check()
        assert dataset.sequence_modes is not None
        assert dataset.sequence_modes.tolist() == [0, 1] * 3
    with pytest.raises(DataError, match="o_image_text contains images"):
        build_gpt_datasets(report.prefix, "1,0,0", (1, 0, 0), 4)
    with IndexedDataset(report.prefix) as dataset:
        assert dataset.document_indices.tolist() == [0, 2, 4, 6]
        for number, (text, image) in enumerate(zip(TEXTS, IMAGES.values(), strict=True)):
            assert dataset[2 * number].tolist() == [*text.encode(), 256]
            assert unpack_image(dataset[2 * number + 1]) == image
    merge([report.prefix] * 2, tmp_path / "twice")
    with IndexedDataset(tmp_path / "twice") as twice:
        assert unpack_image(twice[11]) == GIF


@pytest.mark.parametrize("length", [5, 6])
def test_texts_are_truncated_or_padded(length: int, pairs: Path, tmp_path: Path) -> None:
    report = tokenize_image_pairs(
        [pairs],
        tmp_path / "o",
        ByteTokenizer(),
        image_folder=pairs.parent,
        append_eod=True,
        pad_length=length,
    )
    assert report.truncated == 1 and report.dataset.seconds < 60
    with IndexedDataset(report.prefix) as dataset:
        texts = [dataset[number].tolist() for number in (0, 2, 4)]
    # A text that fills the length is not truncated.
    assert texts == [[*b"a whal"[:length]], [256] * length, [*"über".encode(), 256][:length]]


def test_invalid_pairs_are_reported_or_counted(pairs: Path, tmp_path: Path) -> None:
    (pairs.parent / "page.jpg").write_text("<html>404</html>")
    (pairs.parent / "empty.png").touch()
    wrong = [
        ({"text": "1", "image": "gone.png"}, f"there is no image {pairs.parent}/gone.png"),
        ({"text": "1", "image": "."}, " is a folder, not an image"),
        ({"text": "1", "image": ""}, "the path of its image is empty"),
        ({"text": "1", "image": "page.jpg"}, "page.jpg begins with 3c 68 74 6d 6c 3e 34 30"),
        ({"text": "1", "image": "empty.png"}, "empty.png is empty; it is not a JPEG"),
        ({"text": "1", "image": ["c", "c"]}, "2 paths of images; give exactly 1"),
        ({"text": "1"}, "no key 'image'"),
        ({"text": "word", "image": "c"}, "'word'"),
    ]
    good = {"text": "1 2", "image": "c"}
    for row, message in wrong:
        pairs.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n{json.dumps(good)}\n")
        with pytest.raises(DataError, match=re.escape(f"{pairs}:2: ") + ".*" + re.escape(message)):
            tokenize_image_pairs([pairs], tmp_path / "o", NullTokenizer(10))
        report = tokenize_image_pairs([pairs], tmp_path / "s", NullTokenizer(10), on_error="skip")
        assert (report.pairs, report.dataset.skipped.documents) == (2, 1)
        assert message in (report.dataset.first_skipped or "")
    assert not list(tmp_path.glob("o*"))
    pairs.write_text(json.dumps(wrong[0][0]))
    with pytest.raises(DataError, match=r"a text and an image in .*gone\.png"):
        tokenize_image_pairs([pairs], tmp_path / "o", NullTokenizer(10), on_error="skip")
    with pytest.raises(DataError, match="give --append-eod as well"):
        tokenize_image_pairs([pairs], tmp_path / "o", NullTokenizer(10), pad_length=5)


def test_images_up_to_a_size_are_read(pairs: Path, tmp_path: Path) -> None:
    largest = max(map(len, IMAGES.values()))
    for number, size in enumerate((largest, largest - 1, None)):
        report = tokenize_image_pairs(
            [pairs], tmp_path / str(number), ByteTokenizer(), max_image_bytes=size, on_error="skip"
        )
        fitting = sum(size is None or len(data) <= size for data in IMAGES.values())
        assert report.pairs == fitting
    with pytest.raises(DataError, match=r"a text and an image in"):
        tokenize_image_pairs(
            [pairs], tmp_path / "1", ByteTokenizer(), max_image_bytes=1, on_error="skip"
        )
    with pytest.raises(DataError, match="--max-image-bytes 0; give at least 1"):
        tokenize_image_pairs([pairs], tmp_path / "o", ByteTokenizer(), max_image_bytes=0)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_the_start_of_each_image_is_checked_in_every_block(
    size: int, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize_image_pairs([pairs], tmp_path / "o", ByteTokenizer())
    prefix = f"{tmp_path}/o_image_text"
    dataset = IndexedDataset(prefix)
    whole = np.concatenate(list(dataset.scan()))
    starts = (dataset.sequence_pointers // whole.itemsize).tolist()
    monkeypatch.setattr(
        IndexedDataset,
        "scan",
        lambda self: (values[at : at + size] for at in range(0, len(values), size)),
    )
    values = whole
    assert verify(prefix).counts.images == 3
    for number, start in enumerate(starts):
        if number % 2:  # documents are a text and an image
            values = whole.copy()
            values[start] = 4
            with pytest.raises(DataError, match=f"sequence {number} is not an image: .* with 4,"):
                verify(prefix)


def test_the_command_and_what_inspect_shows(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "elsewhere.jsonl"
    lines.write_text('{"caption": "A whale", "file": "c"}\n')
    command = ["tokenize-images", "--input", str(lines), "--input-image", str(pairs.parent)]
    command += ["--json-keys", "caption", "file", "--tokenizer-type", "ByteTokenizer"]
    assert main([*command, "--output-prefix", str(tmp_path / "o")]) == 0
    prefix = f"{tmp_path}/o_image_text"
    assert f"{prefix}: 1 pair, 7 tokens" in capsys.readouterr().out
    assert main(["verify", prefix]) == 0
    capsys.readouterr()
    assert main(["inspect", prefix, "--tokenizer-type", "ByteTokenizer"]) == 0
    printed = capsys.readouterr().out
    assert "document 0, 7 tokens, images 1\nA whale\n" in printed
    assert "7 of 257" in printed
