"""Steps of preprocessing alone: batches, limits, endings, shares, and the texts of errors."""

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from megatron_data import ByteTokenizer, DataError, IndexedDataset, preprocess
from megatron_data.errors import TokenizerMismatchError
from megatron_data.plural import plural
from megatron_data.preprocessing import (
    batches,
    engine,
    merge,
    split,
    tokenize_image_pairs,
    trace,
)
from megatron_data.preprocessing.batches import batch_items, encode_or_fault
from megatron_data.preprocessing.encoding import TextEncoder
from megatron_data.preprocessing.engine import WorkOptions, run_job
from megatron_data.preprocessing.existing import refuse_existing, refuse_file
from megatron_data.preprocessing.fingerprints import compare_fingerprints, fingerprint_in
from megatron_data.preprocessing.image_encoding import ImageLocator, TextEnding
from megatron_data.preprocessing.manifest import Counts, check_mask, read_manifest
from megatron_data.preprocessing.pool import ordered_map
from megatron_data.sources.json_lines import JsonLines
from megatron_data.sources.protocol import Fault, Item, UnreadableError
from megatron_data.tokenizers import NullTokenizer

FAULT = Fault("a:1", "json", "why", "a", 1)


def item(number: int, size: int) -> Item:
    return Item(number, None, size, [["x" * size]])


def test_numbers_have_the_noun_in_their_own_number() -> None:
    assert [plural(count, "part") for count in (0, 1, 2, 1234)] == [
        "0 parts",
        "1 part",
        "2 parts",
        "1,234 parts",
    ]


def test_documents_are_grouped_up_to_a_size_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert batches.AT_ONCE == 1_048_576
    monkeypatch.setattr(batches, "AT_ONCE", 10)
    sizes = [4, 6, 1, 9, 25, 3, 3]
    items: list[Any] = [item(number, size) for number, size in enumerate(sizes)]
    groups = list(batch_items(iter([FAULT, *items[:3], FAULT, *items[3:], FAULT])))
    assert groups == [FAULT, items[:2], items[2:3], FAULT, items[3:5], items[5:], FAULT]
    assert list(batch_items(iter([]))) == []
    assert [one.size for one in groups[4]] == [9, 25]  # a document is never cut


def test_only_the_documents_that_a_tokenizer_refuses_become_faults() -> None:
    chunk = SimpleNamespace(fault=lambda one, kind, why: FAULT._replace(kind=kind, reason=why))
    items = [item(number, number) for number in range(4)]

    def encode(some: list[Item]) -> list[int]:
        if any(one.size in (1, 3) for one in some):
            raise DataError("no")
        return [one.size for one in some]

    refused = FAULT._replace(kind="tokens", reason="no")
    assert list(encode_or_fault(chunk, items[::2], encode)) == [(items[::2], [0, 2])]
    assert list(encode_or_fault(chunk, items, encode)) == [
        ([items[0]], [0]),
        ([items[1]], refused),
        ([items[2]], [2]),
        ([items[3]], refused),
    ]


def test_a_pool_needs_a_worker_and_one_works_lazily_in_this_process() -> None:
    with pytest.raises(DataError, match="0 workers; give at least 1"):
        next(ordered_map(str, [1], 0))
    seen: list[int] = []

    def items() -> Iterator[int]:
        for number in range(3):
            seen.append(number)
            yield number

    results = ordered_map(str, items(), 1)
    assert next(results) == "0" and seen == [0]
    assert list(results) == ["1", "2"]


# -- source chunks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (5, 1 << 20),
        (1 << 30, 1 << 20),
        ((1 << 30) + 1024, (1 << 20) + 1),
        (3 << 30, 3 << 20),
        (16 << 30, 16 << 20),
        (1 << 40, 16 << 20),
    ],
)
def test_chunks_have_1_to_16_mebibytes_by_the_size_of_the_input(
    tmp_path: Path, size: int, chosen: int
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    asked: list[tuple[int, int | None]] = []

    class Large(JsonLines):
        def chunks(self, chunk_bytes: int = 0, max_bytes: int | None = None) -> Iterator[Any]:
            asked.append((chunk_bytes, max_bytes))
            return super().chunks(chunk_bytes, max_bytes)

    source = Large(str(tmp_path / "a.jsonl"))
    source.size = size
    for given, expected in ((None, chosen), (7, 7)):
        encoder = TextEncoder(ByteTokenizer(), ("text",), False, 99)
        work = WorkOptions(chunk_bytes=given)
        run_job([source], str(tmp_path / "o"), encoder, work, "preprocess")
        assert asked.pop() == (expected, 99)


@pytest.mark.parametrize("progress", [False, True])
def test_a_progress_bar_ends_at_the_size_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    """Finished chunks of an interrupted run count as well."""
    bars: list[Any] = []

    class Bar(engine.tqdm):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            self.options, self.steps, self.rates, self.closed = options, [], [], 0
            bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.steps.append(n)

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            self.rates.append(s)

        def close(self) -> None:
            self.closed += 1

    monkeypatch.setattr(engine, "tqdm", Bar)
    path = tmp_path / "a.jsonl"
    options: dict[str, Any] = {"chunk_bytes": 30, "progress": progress}
    for content in ('{"text": "a"}\n' * 5 + "no\n", '{"text": "a"}\n' * 6):
        path.write_text(content)
        monkeypatch.setattr(engine, "perf_counter", count(step=0.5).__next__)  # for each chunk
        try:
            made = preprocess([path], tmp_path / "o", ByteTokenizer(), **options)
        except DataError as error:
            assert "a.jsonl:6: not JSON" in str(error)
    assert (made[0].chunks, made[0].resumed_chunks) == (3, 2)
    assert sum(bars[1].steps) == bars[1].options["total"] == made[0].bytes_read == 84
    assert bars[1].rates == ["4.00 tokens/s"] * 3  # two documents of a token
    assert bars[1].options["desc"] == "preprocess"
    assert bars[1].options["disable"] is (None if progress else True)
    assert bars[0].closed == bars[1].closed == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error='ignore'; give one of fail, skip, quarantine"),
        ({"chunk_bytes": 0}, "chunk_bytes=0; give at least 1, or None"),
        ({"max_document_bytes": 0}, "--max-document-bytes 0; give at least 1"),
        ({"workers": 0}, "0 workers; give at least 1"),
        ({"json_keys": ("a", "b", "a")}, "--json-keys a b a: give each key once"),
    ],
)
def test_options_of_a_run_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=message):
        preprocess([tmp_path / "a.jsonl"], tmp_path / "o", ByteTokenizer(), **options)


def test_tables_without_checksums_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = [tmp_path / f"{name}.parquet" for name in "abc"]
    for path in paths:
        parquet.write_table(
            arrow.table({"text": ["a"]}), path, write_page_checksum=path.stem == "b"
        )
    for inputs, name in (
        (paths[:2], f"{paths[0]}: "),
        (paths, f"{paths[0]} and 1 more: "),
        (paths[1:2], None),
    ):
        caplog.clear()
        preprocess(inputs, tmp_path / "o", ByteTokenizer())
        lines = [one.getMessage() for one in caplog.records]
        assert len(lines) == (name is not None)
        assert all(line.startswith(f"{name}no page checksums") for line in lines)


# -- images -----------------------------------------------------------------------------------


def test_texts_beside_images_are_ended_padded_and_cut() -> None:
    tokenizer = ByteTokenizer()
    for append, length, expected in (
        (False, None, [1, 2, 3]),
        (True, None, [1, 2, 3, 256]),
        (True, 5, [1, 2, 3, 256, 256]),
        (True, 3, [1, 2, 3]),
        (True, 1, [1]),
    ):
        ending = TextEnding.from_options(tokenizer, append, length)
        assert ending.apply([1, 2, 3]).tolist() == expected
        assert ending.apply([1, 2, 3]).dtype == np.int32
    with pytest.raises(DataError, match="--pad-length 0; give at least 1"):
        TextEnding.from_options(tokenizer, True, 0)
    with pytest.raises(DataError, match="--pad-length 4 pads texts with the end-of-document token"):
        TextEnding.from_options(tokenizer, False, 4)


def test_a_path_of_an_image_has_at_most_4095_bytes_and_names_of_255() -> None:
    chunk: Any = SimpleNamespace(fault=lambda *_: FAULT._replace(path="/in/a.jsonl"))
    locator = ImageLocator(None)

    def path_of(name: str) -> str:
        return locator.path_of(chunk, Item(1, None, 9, [["text"], [name]]))

    assert path_of("b.gif") == "/in/b.gif"
    assert path_of("/b.gif") == "/b.gif"
    assert path_of("é" * 127 + "a").endswith("éa")
    deep = "d/" * 2000
    assert len(path_of(deep + "x" * 91)) == 4095
    for name in ("x" * 256, "é" * 128, deep + "x" * 92, "a\0"):
        with pytest.raises(UnreadableError, match=r"invalid path: '.*…; give the path of a"):
            path_of(name)
    with pytest.raises(UnreadableError, match="the path of its image is empty"):
        path_of("")
    with pytest.raises(UnreadableError, match="2 paths of images; give exactly 1"):
        locator.path_of(chunk, Item(1, None, 9, [["text"], ["a", "b"]]))
    inside = ImageLocator("s3://bucket/i/")
    row = Item(1, None, 9, [["text"], ["b.gif"]])
    assert inside.path_of(chunk, row) == "s3://bucket/i/b.gif"
    assert inside.path_of(chunk, Item(1, None, 9, [["text"], ["/b.gif"]])) == "/b.gif"
    far: Any = SimpleNamespace(fault=lambda *_: FAULT._replace(path="s3://bucket/in/a.jsonl"))
    assert locator.path_of(far, row) == "s3://bucket/in/b.gif"


@pytest.mark.parametrize("count", [1, 3, 4])
def test_texts_without_images_are_counted_and_three_are_named(tmp_path: Path, count: int) -> None:
    texts, images = tmp_path / "texts", tmp_path / "images"
    texts.mkdir()
    images.mkdir()
    for number in range(count):
        (texts / f"{number}.txt").write_text("a")
    with pytest.raises(DataError) as raised:
        tokenize_image_pairs([texts], tmp_path / "o", ByteTokenizer(), image_folder=images)
    named = ", ".join(f"{texts}/{number}.txt" for number in range(min(count, 3)))
    assert str(raised.value).startswith(
        f"{plural(count, 'text')} without an image of the same name in {images} "
        f"({named}{', …' if count > 3 else ''}); a text and its image need"
    )


# -- manifests and outputs --------------------------------------------------------------------


def test_counts_are_summarized_without_images_unless_there_are_some() -> None:
    assert Counts(2, 0, 3, 1000).summary == "2 documents, 1,000 tokens"
    assert Counts(1, 0, 1, 1, 1, 2048).summary == "1 document, 1 token, 1 image (2,048 bytes)"
    assert Counts(1, 0, 1, 1).to_json() == {
        "documents": 1,
        "empty_documents": 0,
        "sequences": 1,
        "tokens": 1,
    }
    assert Counts(1, 0, 1, 1, 1, 9).to_json()["image_bytes"] == 9


def test_tokenizers_are_compared_by_12_digits_of_their_fingerprints(tmp_path: Path) -> None:
    one, other = (f"sha256:{digit * 64}" for digit in "ab")
    compare_fingerprints({"x": one, "y": None, "z": one})
    with pytest.raises(TokenizerMismatchError) as raised:
        compare_fingerprints({"x": one, "y": None, "z": other})
    assert str(raised.value) == (
        "z was made with tokenizer sha256:bbbbbbbbbbbb, x with sha256:aaaaaaaaaaaa; preprocess one "
        "of them again"
    )
    with pytest.raises(
        TokenizerMismatchError, match=r"x was made with tokenizer sha256:a{12}, not"
    ):
        compare_fingerprints({"x": one}, ByteTokenizer())
    compare_fingerprints({"x": ByteTokenizer().fingerprint}, ByteTokenizer())
    assert fingerprint_in(None) is fingerprint_in({}) is fingerprint_in({"tokenizer": {}}) is None
    assert fingerprint_in({"tokenizer": {"fingerprint": one}}) == one


def test_existing_outputs_are_refused_and_empty_folders_are_not(tmp_path: Path) -> None:
    prefix = str(tmp_path / "o")
    (tmp_path / "o.bin").touch()
    refuse_existing([prefix])  # a file of tokens alone is no dataset
    for suffix in (".idx", ".meta.json"):
        (tmp_path / f"o{suffix}").touch()
        with pytest.raises(DataError, match=rf"o{suffix} exists; give another output"):
            refuse_existing(["other", prefix])
        (tmp_path / f"o{suffix}").unlink()
    folder = tmp_path / "f"
    folder.mkdir()
    refuse_file(folder)
    (folder / "a").touch()
    with pytest.raises(DataError, match="f exists and is not empty"):
        refuse_file(folder)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A dataset of ten documents with 1 to 10 tokens, and its manifest."""
    lines = "".join(f'{{"text": "{"7 " * number}"}}\n' for number in range(1, 11))
    (tmp_path / "a.jsonl").write_text(lines)
    return preprocess([tmp_path / "a.jsonl"], tmp_path / "d", NullTokenizer(9))[0].prefix


@pytest.mark.parametrize(
    ("shares", "parts", "warning"),
    [
        ((0.5, 0.5), [5, 5], None),
        ((1, 1), [5, 5], "the shares sum to 2, not to 1; they are taken as 50.00%, 50.00%"),
        ((0.7, 0.2, 0.1), [7, 2, 1], None),
        ((0.3333333,) * 3, [3, 4, 3], None),  # 3.33 and 6.67 are rounded
        ((0.25, 0.7501), [2, 8], "the shares sum to 1.0001, not to 1"),
        ((1,), [10], None),
    ],
)
def test_shares_are_rounded_to_whole_documents(
    dataset: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    shares: tuple[float, ...],
    parts: list[int],
    warning: str | None,
) -> None:
    outputs = [tmp_path / f"part{number}" for number in range(len(shares))]
    with caplog.at_level(logging.WARNING):
        made = split(dataset, outputs, shares=shares)
    assert [counts.documents for counts in made] == parts
    assert sum(counts.tokens for counts in made) == 55
    assert len(caplog.records) == (warning is not None)
    assert all(one.getMessage().startswith(str(warning)) for one in caplog.records)
    merge(outputs, tmp_path / "m")
    with IndexedDataset(tmp_path / "m") as whole, IndexedDataset(dataset) as before:
        assert whole.tokens.tolist() == before.tokens.tolist()
        assert whole.document_indices.tolist() == before.document_indices.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": (1.0, -0.1)}, "a share or number of -0.1; give a positive number"),
        ({"shares": (1.0, float("inf"))}, "a share or number of inf"),
        ({"shares": (1.0, float("nan"))}, "a share or number of nan"),
        ({"shares": (1.0, 0.01)}, "part 2 of 10 documents is empty; give it a larger share"),
        ({"shares": (0.5, 0.5), "documents": (5, 5)}, "give either shares or numbers"),
        ({"documents": (5, 6)}, "sum to 11, but the dataset has 10"),
    ],
)
def test_shares_that_make_no_dataset_are_refused(
    dataset: str, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        split(dataset, [tmp_path / "a", tmp_path / "b"], **options)


def test_every_token_and_document_is_traced_up_to_the_last(dataset: str) -> None:
    assert trace(dataset, 0).document == 0
    assert (trace(dataset, 54).document, trace(dataset, 54).number) == (9, 10)
    assert trace(dataset, 45).document == 9 and trace(dataset, 44).document == 8
    assert trace(dataset, document=9).first_token == 45
    for token in (-1, 55):
        with pytest.raises(DataError, match=f"has tokens 0 to 54, not {token}"):
            trace(dataset, token)
    for document in (-1, 10):
        with pytest.raises(DataError, match=f"has documents 0 to 9, not {document}"):
            trace(dataset, document=document)
    for given in ({}, {"token": 1, "document": 1}):
        with pytest.raises(DataError, match="give either a token or a document"):
            trace(dataset, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", "is not a manifest of the format"),
        *((key, None, f"is incomplete: {key} is missing") for key in
          ("counts", "tokenizer", "sources", "files")),
    ],
)  # fmt: skip
def test_an_incomplete_manifest_is_refused(
    dataset: str, key: str, value: object, message: str
) -> None:
    path = Path(f"{dataset}.meta.json")
    manifest = orjson.loads(path.read_bytes())
    assert read_manifest(dataset) == manifest
    assert read_manifest(f"{dataset}x") is None
    check_mask(dataset)  # it has none
    path.write_bytes(orjson.dumps(manifest | {key: value}))
    with pytest.raises(DataError, match=message):
        read_manifest(dataset)


def test_only_counts_that_are_exact_in_json_are_summed(dataset: str, tmp_path: Path) -> None:
    path = Path(f"{dataset}.meta.json")
    manifest = orjson.loads(path.read_bytes())
    largest = 2**53 - 1
    path.write_bytes(orjson.dumps(manifest | {"tallies": {"a": 0, "b": largest}}))
    merge([dataset], tmp_path / "m")
    assert read_manifest(tmp_path / "m")["tallies"] == {"a": 0, "b": largest}  # type: ignore[index]
    for wrong in (-1, largest + 1, 1.0, True, "1"):
        path.write_bytes(orjson.dumps(manifest | {"tallies": {"a": wrong}}))
        with pytest.raises(DataError, match=r"is damaged .* is not a count of 'a'"):
            merge([dataset], tmp_path / "m")
