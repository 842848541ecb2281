"""Tests of datasets of texts and images: workers, restarts, skipped pairs, and folders."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    IndexedDataset,
    IndexedDatasetBuilder,
    merge,
    preprocess,
    split,
    verify,
)
from megatron_data.cli import main
from megatron_data.indexed import pack_image, unpack_image
from megatron_data.preprocessing import image_encoding, tokenize_image_pairs, trace
from megatron_data.preprocessing.image_encoding import ImageLocator
from megatron_data.sources.protocol import UnreadableError
from megatron_data.tokenizers import NullTokenizer

PAIRS = 120


def image(number: int) -> bytes:
    return b"GIF89a" + bytes((number * step) % 256 for step in range(number % 50))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Writes lines and the images that they name."""
    folder = tmp_path / "in"
    (folder / "i").mkdir(parents=True)
    rows = []
    for number in range(PAIRS):
        (folder / "i" / f"{number:03}.gif").write_bytes(image(number))
        rows.append({"text": f"{number} " * (number % 4), "image": f"i/{number:03}.gif"})
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def one_by_one(prefix: Path) -> dict[str, bytes]:
    """Writes the files with a plain loop over pairs, without chunks."""
    with IndexedDatasetBuilder(prefix, "int32", multimodal=True) as builder:
        for number in range(PAIRS):
            builder.add_item([number] * (number % 4) + [1000], 0)
            builder.add_item(pack_image(image(number)), 1)
            builder.end_document()
        builder.finalize()
    return files_in(prefix.parent)


def test_files_equal_those_of_a_plain_loop_for_any_number_of_workers(
    lines: Path, tmp_path: Path
) -> None:
    wanted = one_by_one(tmp_path / "loop" / "o_image_text")
    manifests = set()
    for workers, chunk_bytes in ((1, 500), (3, 500), (1, None)):
        folder = tmp_path / f"made{workers}{chunk_bytes}"
        report = tokenize_image_pairs(
            [lines], folder / "o", NullTokenizer(1000), append_eod=True, workers=workers,
            chunk_bytes=chunk_bytes,
        )  # fmt: skip
        assert (report.pairs, report.tokens) == (PAIRS, 300)
        assert report.image_bytes == sum(len(image(number)) for number in range(PAIRS))
        assert (report.dataset.chunks > 3) == (chunk_bytes is not None)
        made = files_in(folder)
        manifests.add(made.pop("o_image_text.meta.json"))
        assert made == wanted
        assert verify(report.prefix).has_manifest
    assert len(manifests) == 2, "chunks stand in the manifest, the number of workers does not"


JOB = """
import sys, time
from megatron_data import tokenizers
from megatron_data.preprocessing import tokenize_image_pairs

class NullTokenizer(tokenizers.NullTokenizer):
    def encode_batch(self, texts):
        time.sleep(0.01)
        return super().encode_batch(texts)

if __name__ == "__main__":
    print("ready", flush=True)
    report = tokenize_image_pairs(
        [sys.argv[1]], sys.argv[2], NullTokenizer(1000), append_eod=True, chunk_bytes=100,
        workers=int(sys.argv[3]),
    )
    print("done", report.dataset.resumed_chunks, flush=True)
"""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 13))]


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_killed_at_random_moments_resume_to_the_same_bytes(
    seed: int, lines: Path, tmp_path: Path, check_resume_after_kills: Callable[..., None]
) -> None:
    calm = tmp_path / "calm" / "o"
    tokenize_image_pairs([lines], calm, NullTokenizer(1000), append_eod=True, chunk_bytes=100)
    (tmp_path / "job.py").write_text(JOB)
    out = tmp_path / "out" / "o"
    out.parent.mkdir()
    program = [str(tmp_path / "job.py"), str(lines), str(out)]
    check_resume_after_kills(seed, program, out, files_in(calm.parent))


def test_a_changed_image_is_read_again(lines: Path, tmp_path: Path) -> None:
    """Its line is unchanged, so only size and time of the image differ."""
    last = lines.parent / "i" / f"{PAIRS - 1:03}.gif"
    last.unlink()
    arguments = ([lines], tmp_path / "o", NullTokenizer(1000))
    with pytest.raises(DataError, match=r"a\.jsonl:120: there is no image"):
        tokenize_image_pairs(*arguments, chunk_bytes=500)
    last.write_bytes(image(PAIRS - 1))
    (lines.parent / "i" / "000.gif").write_bytes(b"GIF89a" + b"new")
    report = tokenize_image_pairs(*arguments, chunk_bytes=500)
    assert report.dataset.resumed_chunks == report.dataset.chunks - 2
    with IndexedDataset(report.prefix) as made:
        assert unpack_image(made[1]) == b"GIF89anew"


def test_skipped_lines_are_quarantined_and_the_others_traced(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (3, 40):
        (lines.parent / "i" / f"{number:03}.gif").write_text("<html>404</html>")
    rows = lines.read_text().splitlines(keepends=True)
    rows[10], rows[50] = '{"text": 1}\n', rows[50].replace("50 ", "word ")
    lines.write_text("".join(rows))
    report = tokenize_image_pairs(
        [lines], tmp_path / "o", NullTokenizer(1000), on_error="quarantine", workers=1,
        chunk_bytes=500,
    )  # fmt: skip
    records = [json.loads(line) for line in (tmp_path / "o.quarantine.jsonl").open()]
    kinds = [("image", 4), ("type", 11), ("image", 41), ("tokens", 51)]
    assert [(row["kind"], row["number"]) for row in records] == kinds
    assert report.dataset.skipped.kinds == {"image": 2, "tokens": 1, "type": 1}
    kept = [number for number in range(1, PAIRS + 1) if number not in {4, 11, 41, 51}]
    assert report.pairs == len(kept)
    for document in (0, 3, 8, 40, 60, len(kept) - 1):
        found = trace(report.prefix, document=document)
        assert (found.path, found.number) == (str(lines), kept[document])
    with IndexedDataset(report.prefix) as made:
        place = int(made.sequence_lengths[: 2 * 60 + 1].sum())  # the start of its image
    assert trace(report.prefix, place).number == kept[60]
    halves = split(report.prefix, [tmp_path / "a", tmp_path / "b"], shares=(1, 2))
    both = merge([report.prefix, report.prefix], tmp_path / "twice")
    images = sum(pack_image(image(number - 1)).nbytes for number in kept)
    for counts, times in ((report.dataset.counts, 1), (both, 2), (verify(report.prefix).counts, 1)):
        assert (counts.tokens, counts.images) == (times * report.tokens, times * len(kept))
        assert counts.image_bytes == times * images
    assert sum(half.tokens for half in halves) == report.tokens
    assert sum(half.images for half in halves) == len(kept)
    once, twice, part = (
        json.loads(Path(f"{prefix}.meta.json").read_text()).get("tallies")
        for prefix in (report.prefix, tmp_path / "twice", tmp_path / "a")
    )
    assert once["text_tokens"] == report.tokens and part is None
    assert twice == {name: 2 * count for name, count in once.items()}
    merge([tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    assert verify(tmp_path / "m").has_manifest
    capsys.readouterr()
    assert main(["verify", report.prefix]) == 0
    assert f"{report.tokens} tokens, {len(kept)} images ({images:,} b" in capsys.readouterr().out
    manifest = Path(f"{report.prefix}.meta.json")
    content = json.loads(manifest.read_text())
    assert content["counts"]["image_bytes"] == images
    numbers = report.tokens + images // 4
    older = {"documents": len(kept), "empty_documents": 0, "sequences": 2 * len(kept)}
    manifest.write_text(json.dumps(content | {"counts": older | {"tokens": numbers}}))
    assert verify(report.prefix).counts.tokens == report.tokens, "an older manifest"
    assert trace(report.prefix, place).number == kept[60]
    assert trace(tmp_path / "m", document=0).number == kept[round(len(kept) / 3)]


@pytest.mark.parametrize("form", ["bytes", "struct", "mixed"])
def test_images_in_a_column_give_the_same_dataset_as_image_files(
    form: str, lines: Path, tmp_path: Path
) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = tokenize_image_pairs([lines], tmp_path / "w", NullTokenizer(1000), append_eod=True)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    images: list[Any] = [image(number) for number in range(PAIRS)]
    if form != "bytes":
        images = [{"bytes": data, "path": "not there.gif"} for data in images]
    if form == "mixed":  # the format of `datasets` for images that are not embedded
        images[::2] = [{"bytes": None, "path": row["image"]} for row in rows[::2]]
    table = arrow.table({"text": [row["text"] for row in rows], "image": images})
    parquet.write_table(table, lines.with_suffix(".parquet"))
    inputs = [lines.with_suffix(".parquet")]
    made = tokenize_image_pairs(
        inputs, tmp_path / "o", NullTokenizer(1000), append_eod=True, chunk_bytes=500
    )
    assert (made.pairs, made.tokens, made.image_bytes) == (
        *(wanted.pairs, wanted.tokens, wanted.image_bytes),
    )
    for suffix in (".bin", ".idx"):
        whole = Path(f"{wanted.prefix}{suffix}").read_bytes()
        assert Path(f"{made.prefix}{suffix}").read_bytes() == whole
    assert verify(made.prefix).has_manifest
    assert trace(made.prefix, document=7).number == 8
    with pytest.raises(DataError, match=r"more than --max-image-bytes 20"):
        tokenize_image_pairs(inputs, tmp_path / "p", NullTokenizer(1000), max_image_bytes=20)


def test_bytes_in_a_column_are_refused_as_text_and_checked_as_images(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    for value in (b"<html>", {"bytes": b"<html>", "path": "1.gif"}):
        parquet.write_table(arrow.table({"text": ["1"], "image": [value]}), path)
        with pytest.raises(
            DataError, match=r"row 1: its image begins with 3c 68 .*it is not a JPEG"
        ):
            tokenize_image_pairs([path], tmp_path / "o", NullTokenizer(9))
        with pytest.raises(DataError, match=r"row 1: 'image' holds bytes, such as those of an ima"):
            preprocess([path], tmp_path / "o", NullTokenizer(9), json_keys=["image"])
    parquet.write_table(arrow.table({"text": ["1"], "image": [None]}), path)
    with pytest.raises(DataError, match="'image' holds"):
        tokenize_image_pairs([path], tmp_path / "o", NullTokenizer(9))


@pytest.mark.parametrize("name", ["a\0b.gif", "data:image/gif;base64," + "R0lG" * 100, "i/" * 2100])
def test_invalid_paths_of_images_are_skipped(lines: Path, tmp_path: Path, name: str) -> None:
    with lines.open("a") as file:
        file.write(json.dumps({"text": "1", "image": name}))
    arguments = ([lines], tmp_path / "o", NullTokenizer(1000))
    with pytest.raises(DataError, match=r"a\.jsonl:121: .*invalid path: '.{40}"):
        tokenize_image_pairs(*arguments)
    report = tokenize_image_pairs(*arguments, on_error="skip")
    assert (report.pairs, report.dataset.skipped.kinds) == (PAIRS, {"image": 1})


def test_images_may_lie_in_object_storage(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    storage = fsspec.filesystem("memory")
    for number in range(9):
        storage.pipe(f"/whales/{number}.gif", image(number))
    lines = tmp_path / "a.jsonl"
    rows = [{"text": str(number), "image": f"{number}.gif"} for number in range(10)]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = "memory://whales"
    arguments = ([lines], tmp_path / "o", NullTokenizer(100))
    with pytest.raises(DataError, match=r"a\.jsonl:10: there is no image memory://whales/9\.gif"):
        tokenize_image_pairs(*arguments, image_folder=folder, chunk_bytes=40)
    storage.pipe("/whales/0.gif", b"GIF89a new")
    report = tokenize_image_pairs(*arguments, image_folder=folder, chunk_bytes=40, on_error="skip")
    assert (report.pairs, report.dataset.skipped.kinds) == (9, {"image": 1})
    assert report.dataset.resumed_chunks == report.dataset.chunks - 2, (
        "the first, and the one not done"
    )
    with IndexedDataset(report.prefix) as made:
        assert [unpack_image(made[n]) for n in (1, 17)] == [b"GIF89a new", image(8)]
    storage.rm("/whales", recursive=True)


def test_reading_is_limited_if_the_server_reports_no_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/unsized/a.gif", content := image(1) + b"x" * (3 << 20))
    whole = type(memory).info

    def unsized(self: Any, path: str, **options: Any) -> dict[str, Any]:
        return {**whole(self, path, **options), "size": None}

    monkeypatch.setattr(type(memory), "info", unsized)
    url = "memory://unsized/a.gif"
    for limit in (None, len(content)):
        assert ImageLocator(None, max_bytes=limit).read(url) == content
    with pytest.raises(UnreadableError, match=r"at least .* bytes, more than --max-image-bytes"):
        ImageLocator(None, max_bytes=len(content) - 1).read(url)
    with pytest.raises(UnreadableError, match="has at least 1,048,576 bytes"):  # not all of it
        ImageLocator(None, max_bytes=9).read(url)
    memory.rm("/unsized", recursive=True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError, "there is no image"),
        (NotADirectoryError, "there is no image"),
        (IsADirectoryError, "is a folder, not an image"),
    ],
)
def test_an_image_may_be_removed_after_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError], reason: str
) -> None:
    (tmp_path / "a.gif").write_bytes(image(1))

    def gone(path: str) -> None:
        raise error(path)

    monkeypatch.setattr(image_encoding, "open_file", gone)
    with pytest.raises(UnreadableError, match=reason):
        ImageLocator(None).read(str(tmp_path / "a.gif"))


def test_a_growing_image_is_not_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(content := image(1) + b"x" * 999)
    small = image_encoding.stat(str(path))._replace(size=30)
    monkeypatch.setattr(image_encoding, "stat", lambda _: small)
    assert ImageLocator(None).read(str(path)) == content
    with pytest.raises(UnreadableError, match="more than --max-image-bytes 99"):
        ImageLocator(None, max_bytes=99).read(str(path))


def test_tokens_of_texts_and_beginnings_of_images_are_verified(lines: Path, tmp_path: Path) -> None:
    """The values of images exceed any vocabulary, and are not compared with it."""
    report = tokenize_image_pairs([lines], tmp_path / "o", NullTokenizer(1000))
    path = Path(f"{report.prefix}.meta.json")
    manifest = json.loads(path.read_text())
    manifest["tokenizer"]["vocab_size"] = 119
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="holds token 119, but the vocabulary has 119"):
        verify(report.prefix)
    manifest["tokenizer"]["vocab_size"] = 120
    bin_path = Path(f"{report.prefix}.bin")
    with IndexedDataset(report.prefix) as made:
        data = bytearray(bin_path.read_bytes())
        data[made.sequence_pointers[5]] = 7
    digest = hashlib.sha256(data).hexdigest()
    manifest["files"]["bin"] |= {"sha256": digest, "blocks": [digest]}
    for content, message in ((bin_path.read_bytes(), None), (data, "sequence 5 is not an image")):
        bin_path.write_bytes(content)
        path.write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=message or "same size, different content"):
            verify(report.prefix)


def test_text_files_are_paired_with_images_of_the_same_name(tmp_path: Path) -> None:
    texts, images = tmp_path / "texts", tmp_path / "images"
    for name in ("b", "a", "deep/c.d"):
        for folder, suffix, data in ((texts, ".txt", name.encode()), (images, ".gif", image(9))):
            (folder / f"{name}{suffix}").parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}{suffix}").write_bytes(data)
    command = ["tokenize-images", "--input", str(texts), "--input-image", str(images)]
    command += ["--tokenizer-type", "ByteTokenizer", "--output-prefix", str(tmp_path / "o")]
    assert main(command) == 0
    with IndexedDataset(tmp_path / "o_image_text") as made:
        assert [bytes(made[n].tolist()).decode() for n in (0, 2, 4)] == ["a", "b", "deep/c.d"]
        assert unpack_image(made[5]) == image(9)
    assert trace(tmp_path / "o_image_text", document=2).path == str(texts / "deep" / "c.d.txt")
    (texts / "b.txt").rename(texts / "x.txt")
    (images / "a.png").write_bytes(image(1))
    arguments = ([texts], tmp_path / "f", ByteTokenizer())
    with pytest.raises(DataError, match=r"a\.gif and .*a\.png have the same name"):
        tokenize_image_pairs(*arguments, image_folder=images)
    (images / "a.png").unlink()
    message = (
        r"1 text without an image of the same name in \S*images \(\S*x\.txt\) and 1 image without "
        r"a text \(\S*b\.gif\)"
    )
    with pytest.raises(DataError, match=message):
        tokenize_image_pairs(*arguments, image_folder=images)
    with pytest.raises(DataError, match="text files do not name images; give --input-image"):
        tokenize_image_pairs(*arguments)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "a", "image": "a.gif"}')
    with pytest.raises(
        DataError, match="texts is a text file or a folder of them, and other inputs"
    ):
        tokenize_image_pairs([lines, texts], tmp_path / "f", ByteTokenizer(), image_folder=images)
    assert not list(tmp_path.glob("f*"))
