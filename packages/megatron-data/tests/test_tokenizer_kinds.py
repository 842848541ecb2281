"""Tests of Megatron's kinds of tokenizers against the libraries that they wrap."""

import base64
import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
)
from megatron_data.cli.main import main
from megatron_data.tokenizers import SentencePieceTokenizer, TikTokenizer, tik_token
from megatron_data.tokenizers.text_splitting import SEGMENT_CHARACTERS
from megatron_data.tokenizers.threads import may_use_threads
from megatron_data.tokenizers.tik_token import PATTERNS, SPECIAL_TOKENS

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

HARD = [
    "",
    "  two  spaces\n\tand a tab ",
    "the whale</s>the ship <EOD><extra_id_1> naïve 日本 12345 DON'T",
    "<pad><SPECIAL_9>",
]


@pytest.fixture(scope="module")
def model(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model with <unk>, <s>, </s> and byte fallback, without padding."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=content,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(content.getvalue())
    return path


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    """Returns the bytes, and tokens that merge two earlier tokens."""
    merges = ["eS", "th", "he", "the", " the", "wh", "al", "whal", "whale", " s", "ea"]
    return [*(bytes([n]) for n in range(256)), *(word.encode() for word in merges)]


@pytest.fixture(scope="module")
def vocabulary(ranks: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiktoken") / "vocabulary.json"
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for n, token in enumerate(ranks)
    ]
    path.write_text(json.dumps(entries))
    return path


def test_a_sentencepiece_model_alone_gives_the_librarys_tokens(
    model: Path, texts: list[str]
) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.eod_id) == (420, 1, 2, 2)
    assert ours.pad_id is None and isinstance(ours, Tokenizer)
    for text in [*HARD, *texts[:50]]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_batch(texts) == theirs.encode(texts)
    assert ours.decode(ours.encode(texts[0])) == theirs.decode(theirs.encode(texts[0])) == texts[0]


def test_llama2_begins_every_text(model: Path, texts: list[str]) -> None:
    alone = SentencePieceTokenizer.load(model)
    llama = build_tokenizer("Llama2Tokenizer", tokenizer_model=model)
    assert llama.encode_batch(texts) == [[1, *alone.encode(text)] for text in texts]
    assert llama.encode("") == [1]
    assert llama.decode(llama.encode(texts[0])) == texts[0]
    assert llama.fingerprint != alone.fingerprint


def test_megatrons_added_tokens_and_the_sentinels_of_t5(model: Path) -> None:
    ours = SentencePieceTokenizer.load(
        model, added_tokens=True, extra_ids=2, special_tokens=("<fim_prefix>",)
    )
    added = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<extra_id_0>", "<extra_id_1>"]
    assert [ours.token(number) for number in range(420, ours.vocab_size)] == [
        *added,
        "<fim_prefix>",
    ]
    # <s> and </s> are in the model; the padding token is added.
    assert (ours.bos_id, ours.eos_id, ours.eod_id, ours.pad_id) == (1, 2, 422, 424)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(model))
    text = "the <extra_id_1>whale<EOD>said</s>"
    expected = [*plain.encode("the "), 426, *plain.encode("whale"), 422, *plain.encode("said"), 2]
    assert ours.encode(text) == expected
    assert ours.encode_batch([text, "the"]) == [expected, plain.encode("the")]
    assert ours.decode(expected).replace(" ", "") == text.replace(" ", "")
    with pytest.raises(DataError, match="token 428 is out of range; token ids are 0 to 427"):
        ours.decode([428])
    for tokens, wrong in (([3, 428, 0], 428), ([3, -1, 7], -1), ([-1, 428], 428)):
        with pytest.raises(DataError, match=f"token {wrong} is out of range"):
            ours.decode(tokens)
    assert ours.token_id("<CLS>") == 420 and ours.token_id("no such piece") is None
    assert (ours.token_id("<unk>"), ours.token(0), ours.decode([420, 1])) == (
        0,
        "<unk>",
        "<CLS><s>",
    )
    assert (ours.token(419), ours.token(420)) == (plain.id_to_piece(419), "<CLS>")
    assert (ours.token(-1), ours.token(428)) == (None, None)
    assert build_tokenizer("SentencePieceTokenizer", tokenizer_model=model).vocab_size == 425


def test_a_model_with_the_ids_of_t5(texts: list[str]) -> None:
    """Padding is 0, and there is no beginning of text; Megatron adds it as <BOS>."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[:40]),
        model_writer=content,
        vocab_size=60,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    alone = SentencePieceTokenizer(content.getvalue())
    assert (alone.pad_id, alone.eos_id, alone.eod_id, alone.bos_id) == (0, 1, 1, None)
    added = SentencePieceTokenizer(content.getvalue(), added_tokens=True)
    assert (added.pad_id, added.eos_id, added.token_id("<BOS>")) == (0, 1, added.bos_id)
    assert added.vocab_size == 60 + 5  # <CLS>, <SEP>, <EOD>, <MASK>, <BOS>
    with pytest.raises(DataError, match="the sentencepiece model has no beginning-of-text token"):
        SentencePieceTokenizer(content.getvalue(), begin=True)
    for options in ({"extra_ids": 1}, {"special_tokens": ["<a>"]}):
        with pytest.raises(DataError, match="extra_ids and special_tokens need added_tokens=True"):
            SentencePieceTokenizer(content.getvalue(), **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="this is not a sentencepiece model: it is empty"):
        SentencePieceTokenizer(b"")


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_a_tiktoken_vocabulary_gives_the_librarys_tokens(
    pattern: str, vocabulary: Path, ranks: list[bytes], texts: list[str]
) -> None:
    theirs = tiktoken.Encoding(
        "x",
        pat_str=PATTERNS[pattern],
        mergeable_ranks={token: n for n, token in enumerate(ranks)},
        special_tokens={},
    )
    ours = build_tokenizer(
        "TikTokenizer",
        tokenizer_model=vocabulary,
        tiktoken_pattern=pattern,
        tiktoken_num_special_tokens=10,
    )
    assert ours.vocab_size == len(ranks) + 10 and isinstance(ours, Tokenizer)
    assert (ours.bos_id, ours.eos_id, ours.eod_id, ours.pad_id) == (1, 2, 2, 4)
    for text in [*texts[:50], "theSea"]:
        assert ours.encode(text) == [10 + n for n in theirs.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_batch(HARD) == [ours.encode(text) for text in HARD]
    assert ours.encode(HARD[3]) == [4, 9]
    assert (ours.decode([0]), ours.decode([]), ours.vocab_size) == ("<unk>", "", 277)
    assert (ours.token_id("<s>"), ours.token_id("<SPECIAL_9>"), ours.token_id("<no>")) == (
        1,
        9,
        None,
    )
    for tokens, wrong in (([3, 277, 0], 277), ([3, -1, 7], -1), ([-1, 277], 277)):
        with pytest.raises(
            DataError, match=f"token {wrong} is out of range; token ids are 0 to 276"
        ):
            ours.decode(tokens)
    assert ours.decode(ours.encode(HARD[2])) == HARD[2]


def test_the_two_patterns_differ_and_so_do_their_fingerprints(
    vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v1, v2 = (TikTokenizer.load(vocabulary, pattern=pattern) for pattern in ("v1", "v2"))
    assert v1.fingerprint != v2.fingerprint
    # A word ends before a capital in v2 alone.
    assert [len(v1.encode("theSea")), len(v2.encode("theSea"))] == [3, 3]
    assert v1.encode("theSea")[1] == 1256 and v2.encode("theSea")[0] == 1259
    smaller = TikTokenizer.load(vocabulary, vocab_size=1260)
    assert smaller.vocab_size == 1260 and smaller.fingerprint != v2.fingerprint
    assert TikTokenizer.load(vocabulary, vocab_size=1267).fingerprint == v2.fingerprint
    assert max(smaller.encode("theSea whale")) < 1260
    assert tik_token.LARGEST == 131_072
    monkeypatch.setattr(tik_token, "LARGEST", 1260)
    assert TikTokenizer.load(vocabulary).fingerprint == smaller.fingerprint
    assert TikTokenizer.load(vocabulary, vocab_size=1256).encode("the") == [1116, 1104, 1101]
    for size in (1255, 1268):
        with pytest.raises(DataError, match=f"a vocabulary of {size}; give 1256 to 1267"):
            TikTokenizer.load(vocabulary, vocab_size=size)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"])
def test_saved_and_pickled_tokenizers_are_equal(
    kind: str, model: Path, vocabulary: Path, tmp_path: Path
) -> None:
    options = {
        "SentencePieceTokenizer": {"tokenizer_model": model, "vocab_extra_ids": 2},
        "Llama2Tokenizer": {"tokenizer_model": model},
        "TikTokenizer": {"tokenizer_model": vocabulary, "tiktoken_pattern": "v1"},
    }[kind]
    tokenizer = build_tokenizer(kind, **options)
    tokenizer.save(tmp_path)
    for other in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert type(other) is type(tokenizer)
        assert other.fingerprint == tokenizer.fingerprint
        assert other.encode_batch(HARD) == tokenizer.encode_batch(HARD)


def test_several_texts_have_several_threads_unless_the_environment_forbids_them(
    model: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is that of the tokenizers library; workers of `preprocess` set it."""
    seen: list[object] = []

    class Processor(sentencepiece.SentencePieceProcessor):  # type: ignore[misc]
        def encode(self, given: object, **options: object) -> object:
            seen.append(options.get("num_threads"))
            return super().encode(given, **options)

    class Encoding(tiktoken.Encoding):  # type: ignore[misc]
        def encode_batch(self, texts: list[str], **options: object) -> object:
            seen.append(options["num_threads"])
            return super().encode_batch(texts, **options)

    monkeypatch.setattr(sentencepiece, "SentencePieceProcessor", Processor)
    monkeypatch.setattr(tiktoken, "Encoding", Encoding)
    monkeypatch.setattr(tik_token.os, "cpu_count", lambda: 3)
    pieces, words = SentencePieceTokenizer.load(model), TikTokenizer.load(vocabulary)
    for value, threads in ((None, [-1, 3]), ("true", [-1, 3]), ("false", [1])):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if value is not None:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        assert may_use_threads() == (value != "false")
        seen.clear()
        encoded = [made.encode_batch(["the sea", "a"]) for made in (pieces, words)]
        assert seen == threads
        assert encoded == [
            [made.encode(one) for one in ("the sea", "a")] for made in (pieces, words)
        ]


def test_special_tokens_are_added_after_the_vocabulary(tokenizer: HuggingFaceTokenizer) -> None:
    names = ["<fim_prefix>", "<|endoftext|>", "<fim_suffix>"]
    more = tokenizer.with_special_tokens(names)
    size = tokenizer.vocab_size
    assert more.vocab_size == size + 2 and more.fingerprint != tokenizer.fingerprint
    assert [more.token_id(name) for name in names] == [size, tokenizer.eod_id, size + 1]
    assert more.eod_id == tokenizer.eod_id
    text = "the <fim_suffix>whale"
    expected = [*tokenizer.encode("the "), size + 1, *tokenizer.encode("whale")]
    assert more.encode(text) == expected and more.decode(expected) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "LlamaTokenizer"},
            "unknown tokenizer type 'LlamaTokenizer'; give one of Hugging",
        ),
        ({"kind": "Llama2Tokenizer"}, "Llama2Tokenizer needs --tokenizer-model"),
        (
            {"kind": "Llama2Tokenizer", "tokenizer_model": "x", "vocab_extra_ids": 3},
            "--vocab-extra-ids does not go with --tokenizer-type Llama2Tokenizer",
        ),
        ({"kind": "TikTokenizer", "tokenizer_model": "nowhere"}, "no tokenizer file nowhere"),
        ({"kind": "Llama2Tokenizer", "tokenizer_model": __file__}, "is not a sentencepiece model"),
        ({"kind": "TikTokenizer", "tokenizer_model": __file__}, r"test_tokenizer_kinds.py: .*JSON"),
        (
            {"kind": "SentencePieceTokenizer", "tokenizer_model": "M", "vocab_extra_ids": -1},
            "extra_ids=-1; give at least 0",
        ),
        (
            {"kind": "TikTokenizer", "tokenizer_model": "V", "vocab_size": 5000},
            "267 tokens and 1000 special tokens do not make a vocabulary of 5000; "
            "give 1256 to 1267",
        ),
        (
            {"kind": "TikTokenizer", "tokenizer_model": "V", "tiktoken_num_special_tokens": 3},
            "7 special tokens are given, but num_special_tokens is 3",
        ),
        (
            {"kind": "TikTokenizer", "tokenizer_model": "V", "tokenizer_special_tokens": ["<s>"]},
            "the special tokens lack <unk>",
        ),
        (
            {
                "kind": "TikTokenizer",
                "tokenizer_model": "V",
                "tokenizer_special_tokens": [*SPECIAL_TOKENS, "<SPECIAL_9>"],
            },
            "<SPECIAL_9> is given 2 times",
        ),
        ({"kind": None, "tokenizer_model": "M"}, "looks like a sentencepiece model"),
    ],
)
def test_invalid_options_of_kinds_are_refused(
    options: dict[str, object], message: str, model: Path, vocabulary: Path
) -> None:
    given = {
        key: {"M": model, "V": vocabulary}.get(str(value), value) for key, value in options.items()
    }
    with pytest.raises(DataError, match=message):
        build_tokenizer(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("library", ["sentencepiece", "tiktoken"])
def test_libraries_of_kinds_are_extras(
    library: str, model: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    load = SentencePieceTokenizer.load if library == "sentencepiece" else TikTokenizer.load
    path = model if library == "sentencepiece" else vocabulary
    wanted = rf"^{path}: {library} is not installed; pip install 'megatron-data\[{library}\]'$"
    with pytest.raises(DataError, match=wanted):
        load(path)


BYTES = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "not a JSON list"),
        ([{"rank": 1, "token_bytes": "AA==", "token_str": ""}], "entry 0 lacks rank 0"),
        ([{"rank": 0, "token_bytes": "?", "token_str": ""}], "entry 0: '\\?' is not base64"),
        ([{"rank": 0, "token_bytes": "YQ==", "token_str": ""}], "entry 0 is b'a'"),
        ([*BYTES[:255], {"rank": 255, "token_bytes": "YQ=="}], "entry 255 is b'a'; the first 256"),
        (BYTES[:255], "255 tokens; a vocabulary begins with the 256 bytes"),
        ([*BYTES, {"rank": 256, "token_bytes": "AA=="}], "a token occurs twice"),
    ],
)
def test_an_invalid_vocabulary_is_refused(entries: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TikTokenizer(json.dumps(entries).encode())
    assert TikTokenizer(json.dumps(BYTES).encode()).vocab_size == 1256


def test_the_command_line_takes_every_kind(
    model: Path, vocabulary: Path, texts: list[str], corpus: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {
        "llama": {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(model)},
        "tik": {
            "tokenizer_type": "TikTokenizer",
            "tokenizer_model": str(vocabulary),
            "tiktoken_pattern": "v1",
            "tiktoken_num_special_tokens": "20",
        },
    }
    for name, options in kinds.items():
        source = ["--input", str(corpus), "--append-eod", "--output-prefix", name]
        flags = [(f"--{option.replace('_', '-')}", value) for option, value in options.items()]
        assert main(["preprocess", *source, *(word for pair in flags for word in pair)]) == 0
    llama = SentencePieceTokenizer.load(model, begin=True)
    tik = TikTokenizer.load(vocabulary, pattern="v1", num_special_tokens=20)
    for name, tokenizer in (("llama", llama), ("tik", tik)):
        with IndexedDataset(f"{name}_text_document") as dataset:
            for number in (0, 7, 299):
                expected = [*tokenizer.encode(texts[number]), tokenizer.eod_id]
                np.testing.assert_array_equal(dataset[number], expected)


def test_long_texts_are_split_into_segments_with_the_same_tokens():
    text = "ab\u00fc" * (SEGMENT_CHARACTERS // 2)
    segments = list(ByteTokenizer().split_text(text))
    assert [len(each) for each in segments] == [1 << 18, (3 << 17) - (1 << 18)]
    assert "".join(segments) == text and list(ByteTokenizer().split_text("")) == []
