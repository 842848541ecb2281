"""Edges of tokenizers: tokens around a text, roles, limits of training, damaged folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from megatron_data import (
    DataError,
    HuggingFaceTokenizer,
    build_tokenizer,
    load_tokenizer,
    train_bpe,
)
from megatron_data.tokenizers import NullTokenizer, huggingface, train_unigram, train_wordpiece
from megatron_data.tokenizers.kinds import default_tokenizer_kind, tokenizer_options_error


def of_bytes(template: str | None, *names: str) -> HuggingFaceTokenizer:
    """Returns a tokenizer of bytes with special tokens from 256 on, and a post-processor."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(names))
    if template is not None:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=template,
            special_tokens=[(name, 256 + number) for number, name in enumerate(names)],
        )
    return HuggingFaceTokenizer(made.to_str())


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (None, (), ()),
        ("$A", (), ()),
        ("<s> $A", (256,), ()),
        ("$A </s>", (), (257,)),
        ("<s> $A </s>", (256,), (257,)),
        ("<s> <s> $A </s> <s>", (256, 256), (257, 256)),
    ],
)
def test_tokens_around_a_text_are_known_and_left_out(
    template: str | None, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    tokenizer = of_bytes(template, "<s>", "</s>")
    assert tokenizer.text_edges == (before, after)
    assert tokenizer.encode("ab") == [*tokenizer.encode("a"), *tokenizer.encode("b")]
    assert tokenizer.encode_batch(["ab"]) == [tokenizer.encode("ab")]
    assert tokenizer.vocab_size == 258
    assert tokenizer.added_tokens == {"<s>": 256, "</s>": 257}
    assert (tokenizer.token(256), tokenizer.token(258)) == ("<s>", None)
    assert (tokenizer.token_id("</s>"), tokenizer.token_id("<x>")) == (257, None)


def test_tokens_around_a_text_are_not_those_of_the_text() -> None:
    """With a space before every text, the letter that is looked at has two tokens."""
    definition = json.loads(of_bytes("<s> $A </s>", "<s>", "</s>").definition)
    definition["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer = HuggingFaceTokenizer(json.dumps(definition))
    assert len(tokenizer.encode("a")) == 2
    assert tokenizer.text_edges == ((256,), (257,))


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"), "<|endoftext|>"),
        (("<eos>", "</s>", "<|end_of_text|>"), "<|end_of_text|>"),
        (("<eos>", "</s>"), "</s>"),
        (("<eos>",), "<eos>"),
        (("<x>",), None),
    ],
)
def test_documents_end_with_the_most_specific_known_token(
    names: tuple[str, ...], end: str | None
) -> None:
    tokenizer = of_bytes(None, *names)
    assert tokenizer.eod_id == (None if end is None else tokenizer.token_id(end))
    assert tokenizer.bos_id is tokenizer.eos_id is tokenizer.pad_id is None


def test_an_offset_is_that_of_characters() -> None:
    tokenizer = of_bytes("<s> $A", "<s>")
    ((ids, offsets), (no_ids, none)) = tokenizer.encode_with_offsets(["aéb", ""])
    assert ids == tokenizer.encode("aéb") and (no_ids, none) == ([], [])
    assert offsets == [(0, 1), (1, 2), (1, 2), (2, 3)]


def test_what_is_no_token_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match="these are not tokens of this tokenizer"):
        of_bytes(None).decode([-1])
    with pytest.raises(DataError, match=r"\['a', ''\]: one of them is empty"):
        of_bytes(None).with_special_tokens(["a", ""])


@pytest.mark.parametrize("train", [train_bpe, train_wordpiece])
def test_pairs_are_merged_from_the_second_occurrence_on(train: Any) -> None:
    once, twice = ["qz"], ["qz qz"]
    least = train(once, 300, min_frequency=1)
    assert len(least.encode("qz")) == 1
    assert len(train(once, 300).encode("qz")) == 2
    assert len(train(twice, 300).encode("qz")) == 1
    assert len(train(twice, 300, min_frequency=3).encode("qz")) == 2


def test_the_smallest_vocabularies_are_trained(capfd: pytest.CaptureFixture[str]) -> None:
    texts = ["a whale and a ship"] * 9
    for train in (train_bpe, train_unigram):
        assert train(texts, 257).vocab_size == 257
        with pytest.raises(DataError, match="256 bytes and 1 special token; use at least 257"):
            train(texts, 256)
        names = ["<a>", "<b>"]
        tokenizer = train(texts, 258, special_tokens=names)
        assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.eos_id) == (258, 0, 0)
        assert tokenizer.encode("<b>") == [1]
        with pytest.raises(DataError, match="256 bytes and 2 special tokens; use at least 258"):
            train(texts, 257, special_tokens=names)
    with pytest.raises(DataError, match="a vocabulary of 5 cannot hold 5 special tokens"):
        train_wordpiece(texts, 5)
    pieces = train_wordpiece(texts, 6)
    assert (pieces.eod_id, pieces.bos_id, pieces.pad_id) == (3, 2, 0)  # [SEP], [CLS] and [PAD]
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")  # no progress unless asked for
    train_unigram(texts, 257, progress=True)
    assert "unigram_model_trainer" in capfd.readouterr().err


@pytest.mark.parametrize("train", [train_bpe, train_wordpiece])
def test_training_shows_progress_only_on_request(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library hides its bar where the output is no terminal."""
    shown: list[bool] = []
    trainer = tokenizers.trainers.BpeTrainer

    def watched(**options: Any) -> Any:
        shown.append(options["show_progress"])
        return trainer(**{**options, "show_progress": False})

    monkeypatch.setattr(tokenizers.trainers, "BpeTrainer", watched)
    train(["a b"], 300)
    train(["a b"], 300, progress=True)
    assert shown == [False, True]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"vocab_file": "a", "tokenizer_prompt_format": "b"}, "GPT2BPETokenizer"),
        ({"tokenizer_prompt_format": "b", "chat_template": "c"}, "MultimodalTokenizer"),
        ({"chat_template": "c"}, "SFTTokenizer"),
        ({"sft_tokenizer_prompt_format": "c"}, "SFTTokenizer"),
        ({"tokenizer_model": "c"}, "HuggingFaceTokenizer"),
        ({}, "HuggingFaceTokenizer"),
    ],
)
def test_options_imply_a_kind(given: dict[str, str], kind: str) -> None:
    assert default_tokenizer_kind(given) == kind


def test_options_of_other_kinds_and_missing_ones_are_named() -> None:
    for kind, given, message in (
        (None, {"vocab_file": "a"}, "--vocab-file alone is a GPT2BPETokenizer's, which needs"),
        (None, {"vocab_file": "a", "merge_file": "b"}, None),
        ("BertWordPieceCase", {"vocab_file": "a"}, None),
        ("GPT2BPETokenizer", {"vocab_file": "a"}, "GPT2BPETokenizer needs --merge-file"),
        ("GPT2BPETokenizer", {}, "needs --vocab-file and --merge-file"),
        ("ByteTokenizer", {"vocab_size": 9}, "ByteTokenizer (takes no options)"),
        ("NullTokenizer", {"vocab_size": 9}, None),
        ("NullTokenizer", {"merge_file": 9}, "--merge-file does not go with --tokenizer-type Null"),
    ):
        found = tokenizer_options_error(kind, given)
        assert found is None if message is None else message in str(found)
    assert build_tokenizer("NullTokenizer", vocab_size=9, merge_file=None).vocab_size == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"type": "NullTokenizer", "vocab_size": "9"}, "does not describe a tokenizer of this"),
        ({"type": "Other"}, "does not describe a tokenizer of this package"),
        ([1], "does not describe a tokenizer of this package"),
        ({"type": "SentencePieceTokenizer"}, "no tokenizer file"),
    ],
)
def test_a_damaged_folder_of_a_tokenizer_is_named(
    tmp_path: Path, content: Any, message: str
) -> None:
    NullTokenizer(9).save(tmp_path)
    (tmp_path / "megatron_tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "tokenizer_config.json is not a JSON object; copy it again, or remove it"),
        ('{"eos_token": 5}', "eos_token is 5, not a string"),
        ('{"pad_token": {"content": 5}}', "pad_token is 5, not a string"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(
    tmp_path: Path, content: str, message: str
) -> None:
    of_bytes(None, "<s>").save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)
    config.write_text('{"eos_token": "", "bos_token": {"content": "<s>"}, "pad_token": {}}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (256, None, None)


def test_a_tokenizer_without_a_token_for_a_letter_has_no_edges() -> None:
    only_x = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"x": 0}, merges=[]))
    assert HuggingFaceTokenizer(only_x.to_str()).text_edges == ((), ())


def test_a_named_kind_reads_only_its_own_files(tmp_path: Path) -> None:
    NullTokenizer(9).save(tmp_path / "null")
    model = str(tmp_path / "null")
    assert build_tokenizer(tokenizer_model=model).vocab_size == 10
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=model)
    with pytest.raises(DataError, match="holds a NullTokenizer, which does not support"):
        build_tokenizer(tokenizer_model=model, tokenizer_special_tokens=["<a>"])
    of_bytes(None, "<s>").save(tmp_path / "both")
    (tmp_path / "both/tokenizer.model").write_bytes(b"x")  # beside a tokenizer.json
    for kind in (None, "HuggingFaceTokenizer"):
        model = str(tmp_path / "both")
        extended = build_tokenizer(
            kind, tokenizer_model=model, tokenizer_special_tokens=["<a>", "<s>"]
        )
        assert (extended.vocab_size, extended.encode("<a><s>")) == (258, [257, 256])
    words = tmp_path / "vocab.txt"
    words.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nA\na\n")
    for kind, ids in (("BertWordPieceCase", [5, 6]), ("BertWordPieceLowerCase", [6, 6])):
        made = build_tokenizer(kind, vocab_file=str(words))
        assert (made.vocab_size, made.encode("A a")) == (9, ids)
        more = made.with_special_tokens(["<A>"])
        assert (more.encode("<A>"), more.encode("<a>")) == ([9], [1, 6, 1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"type": "SFTTokenizer", "pad_token": 5}, "pad_token is 5, not a string"),
        ({"type": "MultimodalTokenizer", "options": {"no": 1}}, r"tokenizer.json is damaged \("),
    ],
)
def test_a_damaged_tokenizer_of_conversations_is_named(
    tmp_path: Path, content: Any, message: str
) -> None:
    pytest.importorskip("jinja2")
    of_bytes(None, "<s>").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "megatron_tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_texts_of_more_than_two_segments_are_encoded_in_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface, "SEGMENT_CHARACTERS", 10)
    encode_all, calls = HuggingFaceTokenizer._encode_all, []

    def watched(self: HuggingFaceTokenizer, texts: list[str]) -> list[list[int]]:
        calls.append([*texts])
        return encode_all(self, texts)

    monkeypatch.setattr(HuggingFaceTokenizer, "_encode_all", watched)
    tokenizer = of_bytes(None)
    assert tokenizer.encode_batch(["ab " * 6 + "ab", "c"])[1] == tokenizer.encode("c")
    assert calls == [["ab " * 6 + "ab", "c"]]  # 20 characters
    calls.clear()
    long = "ab " * 7
    assert tokenizer.encode_batch(["c", long]) == [tokenizer.encode(one) for one in ("c", long)]
    assert calls[0] == ["c"] and "".join(calls[1]) == long and len(calls[1]) == 2


def test_only_errors_of_the_library_are_those_of_the_text() -> None:
    """A panic of Rust is no `Exception`, and its class cannot be imported."""
    panic = type("PanicException", (BaseException,), {})
    for error in (ValueError("why"), panic("why")):
        with pytest.raises(DataError, match=r"^what: why$"), huggingface._library_errors("what"):
            raise error
    with pytest.raises(KeyboardInterrupt), huggingface._library_errors("what"):
        raise KeyboardInterrupt
