"""The tokenizer of a run; GPT-2's two files against the library that defined them."""

import json

import pytest
import tokenizers
from megatron_data import ByteTokenizer, DataError, train_bpe
from megatron_train import DataConfig
from megatron_train.errors import TrainError
from megatron_train.tokenizer import open_tokenizer

TEXT = ["the whale sees the ship", "a ship sails on the white sea", "naïve 中文 — 12 'll don't"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """``vocab.json`` and ``merges.txt`` of a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("gpt2")
    train_bpe(TEXT * 3, 290).save(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


def section(**files):
    return DataConfig(seq_length=4, data_path=("a",), **{k: str(v) for k, v in files.items()})


def test_gpt2s_two_files_are_read_as_the_library_does(files):
    vocab, merges = files / "vocab.json", files / "merges.txt"
    theirs = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))
    theirs.add_special_tokens(["<|endoftext|>"])
    ours = open_tokenizer(section(vocab_file=vocab, merge_file=merges))
    end = json.loads(vocab.read_text())["<|endoftext|>"]
    assert ours.eod_id == end and ours.vocab_size == 290
    for text in [*TEXT, "unseen words, and<|endoftext|>an end", "  spaces\n\ttabs  "]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def test_the_kind_may_be_said_or_follow_from_the_files(files, tmp_path):
    by_model = open_tokenizer(section(tokenizer_model=files))
    said = open_tokenizer(section(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=files))
    assert by_model.fingerprint == said.fingerprint
    ByteTokenizer().save(tmp_path)
    assert open_tokenizer(section(tokenizer_model=tmp_path)).vocab_size == 257
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        open_tokenizer(section(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path))
    assert open_tokenizer(section(tokenizer_type="ByteTokenizer")).vocab_size == 257
    null = open_tokenizer(section(tokenizer_type="NullTokenizer"), 101)
    assert (null.vocab_size, null.eod_id) == (101, 100)
    assert open_tokenizer(section()) is None


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "a b", r"vocab is not JSON"),
        ("[1]", "a b", "does not map tokens to numbers"),
        ('{"a": 0}', "a b", r"lacks <\|endoftext\|>"),
        (
            '{"a": 0, "b": 1, "<|endoftext|>": 2}',
            "#version\na b",
            r"merges, line 2: 'a b' does not",
        ),
        ('{"a": 0, "<|endoftext|>": 1}', "a a a", "line 1: 'a a a'"),
        ('{"a": 0, "<|endoftext|>": 1}', b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_files_that_are_none_are_named(tmp_path, vocab, merges, message):
    (tmp_path / "vocab").write_text(vocab)
    (tmp_path / "merges").write_bytes(merges if isinstance(merges, bytes) else merges.encode())
    with pytest.raises(TrainError, match=message):
        open_tokenizer(section(vocab_file=tmp_path / "vocab", merge_file=tmp_path / "merges"))
