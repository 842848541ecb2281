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
    NullTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
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


def test_numbers_equal_those_of_the_library(
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
    path.write_text(json.dumps(dict(reversed(content.items()))))
    loaded = load_tokenizer(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert len(loaded.encode("the whale said the sea and the ship")) > 4


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


def test_null() -> None:
    made = NullTokenizer(100)
    assert (made.encode("3 99"), made.eod_id, made.vocab_size) == ([3, 99], 100, 101)
    with pytest.raises(DataError, match="token 101 is not in 0 to 100"):
        made.encode("3 101")
    with pytest.raises(DataError, match="'x'"):
        made.encode("3 x")


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
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
