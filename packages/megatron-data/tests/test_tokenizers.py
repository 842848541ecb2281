import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from megatron_data.datasets import WordPieces
from megatron_data.tokenizers import NullTokenizer, bert_tokenizer, train_unigram, train_wordpiece
from tokenizers import Tokenizer as Reference


def test_training_gives_special_tokens_the_first_numbers(tokenizer: HuggingFaceTokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.eos_id) == (340, 0, 0)
    assert tokenizer.bos_id is None
    assert tokenizer.encode("the<|endoftext|>") == [*tokenizer.encode("the"), 0]


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batches_equal_single_texts(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_token_ids_equal_those_of_the_library(
    tokenizer: HuggingFaceTokenizer, texts: list[str], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode_batch(texts) == [reference.encode(text).ids for text in texts]


def test_training_twice_gives_the_same_tokenizer(
    tokenizer: HuggingFaceTokenizer, texts: list[str]
) -> None:
    assert train_bpe(texts, 340).fingerprint == tokenizer.fingerprint
    assert train_bpe(texts, 339).fingerprint != tokenizer.fingerprint


def test_saved_tokenizers_load_from_folder_and_file(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.eod_id, loaded.eos_id, loaded.pad_id) == (0, 0, None)
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint


def test_the_fingerprint_ignores_layout_truncation_and_padding(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    padding = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    path.write_text(json.dumps(dict(reversed(content.items()))))
    loaded = load_tokenizer(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert 4 < len(loaded.encode("the whale said the sea and the ship")) < 99


def test_special_tokens_come_from_the_configuration_or_the_caller(
    texts: list[str], tmp_path: Path
) -> None:
    made = train_bpe(texts, 300, special_tokens=["<a>", "<b>", "</s>"])
    made.save(tmp_path)
    config = {"eos_token": {"content": "<b>"}, "pad_token": "<a>", "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eod_id, loaded.eos_id, loaded.pad_id, loaded.bos_id) == (1, 1, 0, None)
    assert load_tokenizer(tmp_path, {"eod": "<a>"}).eod_id == 0
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).eod_id == 2  # </s>, by its name
    with pytest.raises(DataError, match="eod token '<c>' is not in"):
        load_tokenizer(tmp_path, {"eod": "<c>"})


@pytest.mark.parametrize("made", [ByteTokenizer(), NullTokenizer(100)])
def test_plain_tokenizers_save_and_load(made: Tokenizer, tmp_path: Path) -> None:
    made.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == made.fingerprint
    assert loaded.vocab_size == made.vocab_size
    assert isinstance(loaded, Tokenizer)


def test_bytes() -> None:
    made = ByteTokenizer()
    assert made.encode("aé") == [97, 0xC3, 0xA9]
    assert made.decode([97, 0xC3, 0xA9, 256]) == "aé"
    assert made.decode([255, 0]) == "\ufffd\0"
    assert (made.vocab_size, made.eod_id, made.eos_id, made.bos_id) == (257, 256, 256, None)
    assert made.encode_batch(["b", ""]) == [[98], []]


def test_null() -> None:
    made = NullTokenizer(100)
    assert (made.encode("3 99"), made.eod_id, made.vocab_size) == ([3, 99], 100, 101)
    with pytest.raises(DataError, match="token 101 is out of range; token ids are 0 to 100"):
        made.encode("3 101")
    with pytest.raises(DataError, match="'x'"):
        made.encode("3 x")
    assert made.encode_batch(["100 0", ""]) == [[100, 0], []]
    assert (made.eos_id, made.decode([3, 99])) == (100, "3 99")
    for text, wrong in (("-1 5", -1), ("5 101 -1", 101)):
        with pytest.raises(DataError, match=f"token {wrong} is out of range"):
            made.encode(text)
    with pytest.raises(DataError, match=f"spaces, got '{'x' * 40}'$"):
        made.encode("x" * 41)
    assert NullTokenizer(1).vocab_size == 2
    with pytest.raises(DataError, match="a vocabulary of 0 tokens; give at least 1"):
        NullTokenizer(0)


def test_files_that_cannot_be_loaded_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: this is not the definition"):
        load_tokenizer(tmp_path)


def test_impossible_training_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_bpe(texts, 256)
    with pytest.raises(DataError, match="no text"):
        train_bpe([], 300)
    with pytest.raises(DataError, match="at least one special token"):
        train_bpe(texts, 300, special_tokens=[])


VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "whale", "##s", "swim", "##ming", ".", "a"]


@pytest.fixture
def vocab_file(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*VOCAB, "Whale", ""]))
    return path


def test_berts_vocabulary(vocab_file: Path) -> None:
    """Ids are line indices; Megatron's tokens and T5's sentinels follow them."""
    lower = bert_tokenizer(vocab_file, extra_ids=2)
    assert lower.encode("Whàles\tswimming. Q") == [5, 6, 7, 8, 9, 1]
    assert bert_tokenizer(vocab_file, lower_case=False).encode("Whales swim") == [11, 6, 7]
    assert lower.decode([5, 6, 7, 8]) == "whales swimming"
    assert (lower.vocab_size, lower.pad_id, lower.bos_id, lower.eos_id) == (16, 0, 12, 13)
    assert lower.eod_id == 13
    assert lower.encode("a[EOS]a <extra_id_0>") == [10, 13, 10, 14]
    assert 13 not in lower.encode("[eos]")  # text in another case is no special token
    assert lower.encode("a[SEP][MASK]") == [10, 3, 4]
    pieces = WordPieces.from_tokenizer(lower)
    assert pieces.continuations.nonzero()[0].tolist() == [6, 8]
    assert (pieces.cls_id, pieces.sep_id, pieces.mask_id) == (2, 3, 4)
    assert pieces.sentinel_ids == (14, 15)
    again = pickle.loads(pickle.dumps(lower))
    assert again.fingerprint == lower.fingerprint


def test_a_word_of_bert_has_at_most_200_characters(vocab_file: Path) -> None:
    vocab_file.write_text("\r\n".join([*VOCAB, "##a"]))  # no line end after the last token
    tokenizer = bert_tokenizer(vocab_file)
    assert (tokenizer.token_id("##a"), tokenizer.vocab_size) == (11, 14)
    assert tokenizer.encode("a" * 200) == [10, *[11] * 199]
    assert tokenizer.encode("a" * 201) == [1]
    with pytest.raises(DataError, match="extra_ids=-1; give at least 0"):
        bert_tokenizer(vocab_file, extra_ids=-1)


def test_invalid_vocabularies_are_refused(vocab_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer file"):
        bert_tokenizer(tmp_path / "none")
    vocab_file.write_text("a\nb\na\n")
    with pytest.raises(DataError, match="lines 1 and 3 are both 'a'"):
        bert_tokenizer(vocab_file)
    vocab_file.write_text("a\nb\n")
    with pytest.raises(DataError, match=r"lacks \[PAD\], .*not a vocab.txt of BERT"):
        bert_tokenizer(vocab_file)
    with pytest.raises(DataError, match=r"lacks \[CLS\]"):
        WordPieces.from_tokenizer(train_bpe(["some text"], 300))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tokenizer.model", "Llama2Tokenizer, .*--tokenizer-model .*/tokenizer.model"),
        ("spiece.model", "--tokenizer-model .*/spiece.model"),
        ("vocab.txt", "--tokenizer-type BertWordPieceCase .*--vocab-file"),
        ("merges.txt", "--vocab-file .*vocab.json and --merge-file .*merges.txt"),
        ("qwen.tiktoken", "a tokenizer.json that transformers wrote"),
        ("tekken.json", "a tokenizer.json that transformers wrote"),
    ],
)
def test_files_of_other_kinds_in_a_folder_are_named(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=f"has {name} but no tokenizer.json, .*use .*{remedy}"):
        load_tokenizer(tmp_path)


def test_other_kinds_are_trained(texts: list[str], tmp_path: Path) -> None:
    unigram = train_unigram(texts, 300)
    assert unigram.decode(unigram.encode("the whale é")) == "the whale é"
    assert unigram.eod_id == 0
    pieces = train_wordpiece(texts, 200)
    assert pieces.vocab_size <= 200 and pieces.encode("[SEP] [MASK]") == [3, 4]
    assert WordPieces.from_tokenizer(pieces).continuations.any()
    words = texts[0].lower().split()
    assert pieces.decode(pieces.encode(" ".join(words[:5]))).replace(" ", "") == "".join(words[:5])
    cased = train_wordpiece(texts, 200, lower_case=False)
    assert cased.fingerprint != pieces.fingerprint
    for train, least in ((train_unigram, "at least 257"), (train_wordpiece, "special tokens")):
        with pytest.raises(DataError, match=least):
            train(texts, 5)
        with pytest.raises(DataError, match="no text to train"):
            train([], 300)


def test_a_tokenizer_without_word_pieces_is_refused_for_masked_datasets():
    with pytest.raises(
        DataError, match="a ByteTokenizer has no word pieces; masked datasets need a"
    ):
        WordPieces.from_tokenizer(ByteTokenizer())
