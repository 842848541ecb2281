"""The tokenizer of a run is opened from the files in its configuration."""

import json

import pytest
from megatron_data import ByteTokenizer, DataError, load_tokenizer, train_bpe
from megatron_train import DataConfig, TrainError
from megatron_train.tokenizer import TokenizerCache, open_tokenizer

TEXT = ["the whale sees the ship", "a ship sails on the white sea", "naïve 中文 — 12 'll don't"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Writes ``vocab.json`` and ``merges.txt`` of a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("gpt2")
    train_bpe(TEXT * 3, 290).save(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


def section(**files):
    return DataConfig(seq_length=4, data_path=("a",), **{k: str(v) for k, v in files.items()})


def test_vocab_and_merge_files_make_a_gpt2_tokenizer(files):
    ours = open_tokenizer(section(vocab_file=files / "vocab.json", merge_file=files / "merges.txt"))
    assert ours.vocab_size == 290
    assert ours.encode(TEXT[0]) == load_tokenizer(files).encode(TEXT[0])
    with pytest.raises(DataError, match="no tokenizer file"):
        open_tokenizer(section(vocab_file="nowhere", merge_file=files / "merges.txt"))


def test_the_kind_is_given_or_follows_from_the_files(files, tmp_path):
    by_model = open_tokenizer(section(tokenizer_model=files))
    by_kind = open_tokenizer(section(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=files))
    assert by_model.fingerprint == by_kind.fingerprint
    ByteTokenizer().save(tmp_path)
    assert open_tokenizer(section(tokenizer_model=tmp_path)).vocab_size == 257
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        open_tokenizer(section(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path))
    assert open_tokenizer(section(tokenizer_type="ByteTokenizer")).vocab_size == 257
    null = open_tokenizer(section(tokenizer_type="NullTokenizer"), 101)
    assert (null.vocab_size, null.eod_id) == (101, 100)
    assert open_tokenizer(section()) is None
    with pytest.raises(TrainError, match="--tokenizer-type NullTokenizer needs --vocab-size"):
        open_tokenizer(section(tokenizer_type="NullTokenizer"))


def test_a_tokenizer_is_opened_once_for_equal_settings_and_sizes(files):
    cache, named = TokenizerCache(), section(tokenizer_model=files)
    first = cache.open(named)
    assert cache.open(section(tokenizer_model=files, split="1,0,0")) is first
    assert cache.open(named, 290) is first  # its own size
    larger = cache.open(named, 300)
    assert larger is not first and cache.open(named, 300) is larger
    null = section(tokenizer_type="NullTokenizer")
    assert cache.open(null, 11) is cache.open(null, 11) is not cache.open(null, 12)
    assert cache.open(null, 12).vocab_size == 12
    assert cache.open(section()) is cache.open(section(), 290) is None
    assert cache.open(section(tokenizer_type="ByteTokenizer")).vocab_size == 257
