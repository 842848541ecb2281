"""Damaged files of every kind are read or refused in one line, in bounded time and memory."""

import bz2
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fuzzing import Mutation, fuzz, mutate_bytes, mutate_json, mutate_text
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    load_tokenizer,
    merge,
    preprocess,
    read_texts,
    verify,
)
from megatron_data.datasets import (
    ConversationLines,
    parse_data_path,
    read_data_args,
    read_data_path_changes,
    read_per_split_data_args,
)
from megatron_data.indexed import pack_image, unpack_image
from megatron_data.order.cache import load_or_build
from megatron_data.preprocessing import tokenize_image_pairs, trace
from megatron_data.preprocessing.encoding import TextEncoder
from megatron_data.preprocessing.manifest import read_manifest
from megatron_data.preprocessing.parts import PartWriter, Task, WorkFolder
from megatron_data.sources.opening import open_sources
from megatron_data.sources.protocol import Fault
from megatron_data.tokenizers import (
    ChatTemplate,
    NullTokenizer,
    SentencePieceTokenizer,
    SFTTokenizer,
    TemplateLimits,
    TikTokenizer,
    bert_tokenizer,
    gpt2_tokenizer,
    huggingface,
    train_unigram,
    train_wordpiece,
)

Read = Callable[[bytes], object]

TEXTS = ["The whale, the whale!", "naïve 日本 <|endoftext|> 12 34", " \n\n a  b"]
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' ~ m.content | trim }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content[:9] }}{% endgeneration %}"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def used(tokenizer: object) -> None:
    """Uses a tokenizer like preprocessing does."""
    assert isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer | TikTokenizer)
    for ids in tokenizer.encode_batch(TEXTS):
        tokenizer.decode(ids)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables fsync to save time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def reads(tmp_path: Path, fuzz_count: int) -> Callable[..., None]:
    """Fuzzes a reader of one file."""

    def check(name: str, read: Callable[[Path], object], *seeds: bytes, mutate: Mutation) -> None:
        path = tmp_path / name

        def one(content: bytes) -> None:
            path.write_bytes(content)
            read(path)

        fuzz(one, seeds, DataError, count=fuzz_count, mutate=mutate)

    return check


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 3))
    return path


@pytest.fixture
def pair(lines: Path, tmp_path: Path) -> str:
    return preprocess([lines], tmp_path / "o", ByteTokenizer(), chunk_bytes=60)[0].prefix


def test_tokenizer_json(reads: Callable[..., None], tokenizer: HuggingFaceTokenizer) -> None:
    words = train_wordpiece(TEXTS * 9, 60)
    pieces = train_unigram(TEXTS * 9, 290)
    seeds = tokenizer.definition, words.definition, pieces.definition
    reads("tokenizer.json", lambda path: used(load_tokenizer(path)), *seeds, mutate=mutate_json)


def test_panics_of_the_library_are_errors(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """Stands for the exception that pyo3 raises."""

    def panic(*arguments: object, **options: object) -> None:
        raise PanicException("index out of\nbounds")

    library = SimpleNamespace(encode=panic, encode_batch=panic, encode_batch_fast=panic)
    library.decode = library.from_str = panic
    whole = HuggingFaceTokenizer(tokenizer.definition)
    monkeypatch.setattr(whole, "_tokenizer", library)
    for call in (whole.encode, whole.encode_batch, whole.encode_with_offsets, whole.decode):
        with pytest.raises(DataError, match=": index out of bounds"):
            call([])  # type: ignore[operator]
    monkeypatch.setattr(huggingface.tokenizers, "Tokenizer", library)
    with pytest.raises(DataError, match="not the definition of a tokenizer: index out of bounds"):
        HuggingFaceTokenizer(tokenizer.definition)


def test_a_text_that_the_vocabulary_cannot_express_is_refused() -> None:
    definition = json.loads(train_wordpiece(TEXTS * 9, 60).definition)
    del definition["model"]["vocab"]["[UNK]"]
    definition["added_tokens"] = []
    lacking = HuggingFaceTokenizer(json.dumps(definition))
    for call in (lacking.encode_batch, lacking.encode_with_offsets):
        with pytest.raises(DataError, match=r"the tokenizer cannot encode this text: .*UNK"):
            call(["Ω"])


def test_tokenizer_config(
    reads: Callable[..., None], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    end = "<|endoftext|>"
    config = {"eos_token": {"content": end}, "bos_token": end, "chat_template": TEMPLATE}
    several = {"chat_template": [{"name": "default", "template": TEMPLATE}]}

    def read(path: Path) -> None:
        used(load_tokenizer(path.parent))
        ChatTemplate.load(path.parent).render(CHAT)

    seeds = (json.dumps(each).encode() for each in (config, several))
    reads("tokenizer_config.json", read, *seeds, mutate=mutate_json)


def test_gpt2_vocabulary(reads: Callable[..., None], tmp_path: Path) -> None:
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\na b\nab c\n")
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, "abc": 5}
    content = json.dumps(vocabulary).encode()
    read = lambda path: used(gpt2_tokenizer(path, merges))  # noqa: E731
    reads("vocab.json", read, content, mutate=mutate_json)
    vocab = tmp_path / "whole.json"
    vocab.write_bytes(content)
    read = lambda path: used(gpt2_tokenizer(vocab, path))  # noqa: E731
    reads("merges.txt", read, merges.read_bytes(), mutate=mutate_text)


def test_bert_vocabulary(reads: Callable[..., None]) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##e", "w", "##hale", "a", ","]
    content = ("\n".join(words) + "\n").encode()
    read = lambda path: used(bert_tokenizer(path, extra_ids=2))  # noqa: E731
    reads("vocab.txt", read, content, mutate=mutate_text)


def test_sentencepiece_model(reads: Callable[..., None], tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_prefix=str(tmp_path / "m"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    content = (tmp_path / "m.model").read_bytes()
    with pytest.raises(DataError, match="not a sentencepiece model"):
        SentencePieceTokenizer(b"")
    read = lambda path: used(SentencePieceTokenizer.load(path, added_tokens=True))  # noqa: E731
    reads("a.model", read, content, mutate=mutate_bytes)


def test_tiktoken_vocabulary(reads: Callable[..., None], tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    from base64 import b64encode

    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
    entries = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": "x"}
        for rank, token in enumerate(tokens)
    ]
    read = lambda path: used(TikTokenizer.load(path, num_special_tokens=10))  # noqa: E731
    accents = [{**entries[0], "token_bytes": "é"}, *entries[1:]]
    (tmp_path / "accents.json").write_text(json.dumps(accents))
    with pytest.raises(DataError, match="entry 0: 'é' is not base64"):
        read(tmp_path / "accents.json")
    reads("t.json", read, json.dumps(entries).encode(), mutate=mutate_json)


def test_saved_tokenizers(
    reads: Callable[..., None], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    template = ChatTemplate(TEMPLATE, {"bos_token": "x"})
    seeds = []
    for each in (SFTTokenizer(tokenizer, template, "<|endoftext|>"), NullTokenizer(9)):
        each.save(tmp_path)
        seeds.append((tmp_path / "megatron_tokenizer.json").read_bytes())
    seeds.append(b'{"type": "TikTokenizer", "options": {"num_special_tokens": 1000}}')
    seeds.append(b'{"type": "SentencePieceTokenizer", "options": {"extra_ids": 3}}')

    def read(path: Path) -> None:
        loaded = load_tokenizer(path.parent)
        if isinstance(loaded, SFTTokenizer):
            loaded.tokenize_conversation(CHAT)

    reads("megatron_tokenizer.json", read, *seeds[:2], mutate=mutate_json)


def test_chat_templates(reads: Callable[..., None]) -> None:
    limits = TemplateLimits(steps=20_000)

    def read(path: Path) -> None:
        ChatTemplate.load(path).with_limits(limits).render(CHAT)

    reads("a.jinja", read, TEMPLATE.encode(), mutate=mutate_text)


def test_an_endless_number_in_a_template_is_refused() -> None:
    with pytest.raises(DataError):
        ChatTemplate("{{ messages == 1e999 }}").render(CHAT)


def test_index(reads: Callable[..., None], pair: str, tmp_path: Path) -> None:
    def read(path: Path) -> None:
        with IndexedDataset(pair) as dataset:
            dataset.check()
            for document in range(dataset.num_documents):
                dataset.document(document)
            if len(dataset):
                dataset[len(dataset) - 1]

    reads("o_text_document.idx", read, Path(f"{pair}.idx").read_bytes(), mutate=mutate_bytes)


def test_manifest(reads: Callable[..., None], pair: str, tmp_path: Path) -> None:
    def read(path: Path) -> None:
        manifest = read_manifest(pair)
        trace(pair, document=8)
        merge([pair], tmp_path / "m")
        if manifest:
            verify(pair)

    seed = Path(f"{pair}.meta.json").read_bytes()
    reads("o_text_document.meta.json", read, seed, mutate=mutate_json)


def test_a_manifest_without_a_count_of_documents_is_refused(pair: str) -> None:
    path = Path(f"{pair}.meta.json")
    content = json.loads(path.read_text())
    del content["counts"]["documents"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"o_text_document\.meta\.json"):
        trace(pair, document=8)


def test_a_count_that_is_not_a_number_is_refused(pair: str) -> None:
    path = Path(f"{pair}.meta.json")
    content = json.loads(path.read_text())
    content["skipped"]["kinds"] = {"long": {}}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"\{\} is not a count of 'long'"):
        merge([pair], f"{pair}_merged")


@pytest.mark.parametrize("column", ["document", "token"])
def test_an_incomplete_map_of_chunks_is_refused(pair: str, column: str) -> None:
    path = Path(f"{pair}.meta.json")
    content = json.loads(path.read_text())
    content["chunks"][column] = [place + 10**6 for place in content["chunks"][column]]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="its map of chunks is damaged"):
        merge([pair], f"{pair}_merged")


def test_json_lines(reads: Callable[..., None], lines: Path) -> None:
    read = lambda path: list(read_texts([path]))  # noqa: E731
    reads("a.jsonl", read, lines.read_bytes(), mutate=mutate_text)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_packed_lines(reads: Callable[..., None], lines: Path, suffix: str) -> None:
    packed: Callable[[bytes], bytes] = gzip.compress if suffix == ".gz" else bz2.compress
    if suffix == ".zst":
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress
    read = lambda path: list(read_texts([path]))  # noqa: E731
    content = packed(lines.read_bytes())
    reads(f"a.jsonl{suffix}", read, content, content * 2, mutate=mutate_bytes)


def test_text_files(reads: Callable[..., None]) -> None:
    read = lambda path: list(read_texts([path]))  # noqa: E731
    reads("a.txt", read, "naïve 日本\n".encode() * 9, mutate=mutate_bytes)


def test_parquet(reads: Callable[..., None], tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    seeds = []
    for options in ({}, {"compression": "none", "use_dictionary": False}):
        parquet.write_table(arrow.table({"text": TEXTS * 3}), tmp_path / "s", **options)
        seeds.append((tmp_path / "s").read_bytes())

    def read(path: Path) -> None:
        (source,) = open_sources([path], ("text",))
        for chunk in source.chunks():
            chunk.digest  # noqa: B018
            for item in chunk.items(("text",), None):
                if isinstance(item, Fault):
                    raise DataError(str(item))

    reads("a.parquet", read, *seeds, mutate=mutate_bytes)


def test_conversations(
    reads: Callable[..., None], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    rows = [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "output": "b", "tools": "[]"},
    ]
    sft = SFTTokenizer(tokenizer, ChatTemplate(TEMPLATE))

    def read(path: Path) -> None:
        opened = ConversationLines(path, sft)
        for number in range(len(opened)):
            opened.conversations(number)

    seeds = [json.dumps(row).encode() for row in rows]
    reads("a.jsonl", read, *seeds, mutate=mutate_json)


def test_lines_with_images(reads: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "b.gif").write_bytes(b"GIF89a" + bytes(20))
    seed = json.dumps({"text": "1", "image": "b.gif"}).encode()

    def read(path: Path) -> None:
        tokenize_image_pairs([path], tmp_path / "o", NullTokenizer(9))

    reads("a.jsonl", read, seed, mutate=mutate_json)


def test_packed_images(reads: Callable[..., None]) -> None:
    packed = pack_image(b"\x89PNG\r\n\x1a\n" + bytes(50))

    def read(path: Path) -> None:
        content = path.read_bytes()
        unpack_image(np.frombuffer(content[: len(content) // 4 * 4], packed.dtype))

    reads("image", read, packed.tobytes(), mutate=mutate_bytes)


def test_data_paths(reads: Callable[..., None], tmp_path: Path) -> None:
    read: Callable[[Path], object] = read_data_args
    reads("args.txt", read, b"0.7 a\n0.3 b\n", b"a b c", mutate=mutate_text)
    content = json.dumps({"train": ["0.7", "a", "0.3", "b"], "valid": "c", "test": None}).encode()
    reads("split.json", read_per_split_data_args, content, mutate=mutate_json)

    def changes(path: Path) -> None:
        for _, words in read_data_path_changes(path):
            parse_data_path(words)

    content = b'[{"from_sample": 8, "data_path": ["0.7", "a", "0.3", "b"]}]'
    reads("changes.json", changes, content, mutate=mutate_json)


def test_cached_orders(tmp_path: Path, fuzz_count: int) -> None:
    """A damaged entry is not used but built again."""

    def build() -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"]:
        return {"a": np.arange(9), "b": np.arange(3)}

    taken = []

    def read(content: bytes) -> None:
        load_or_build(tmp_path, "key", build)
        (tmp_path / "key" / name).write_bytes(content)
        found = load_or_build(tmp_path, "key", build)
        assert {key: array.shape for key, array in found.items()} == {"a": (9,), "b": (3,)}
        taken.append(name)
        if content != seed:
            raise DataError("counted as refused")

    load_or_build(tmp_path, "key", build)
    for name, mutate in (("entry.json", mutate_json), ("a.npy", mutate_bytes)):
        seed = (tmp_path / "key" / name).read_bytes()
        fuzz(read, [seed], DataError, count=fuzz_count // 2, mutate=mutate)


def test_parts_of_a_job(lines: Path, tmp_path: Path, fuzz_count: int) -> None:
    """A damaged part is processed again or named in an error."""
    encoder = TextEncoder(ByteTokenizer(), ("text",), append_eod=True)
    (source,) = open_sources([lines], ("text",))
    (chunk,) = source.chunks()
    task = Task(0, 0, str(lines), chunk)
    with WorkFolder(str(tmp_path / "o"), {"job": 1}) as folder:
        PartWriter(encoder, folder.path, tolerant=True)(task)
        part = folder.path / "00000000.part"

        def read(content: bytes) -> None:
            part.write_bytes(content)
            folder.find_record(task)
            folder.read(0, encoder.outputs)

        fuzz(read, [part.read_bytes()], DataError, count=fuzz_count, mutate=mutate_bytes)
