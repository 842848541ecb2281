"""Tests of the tokenizer of GPT-2's two files, against the library that reads them."""

import json

import numpy as np
import pytest
import tokenizers
from megatron_data import DataError, IndexedDataset, train_bpe
from megatron_data.cli.main import main
from megatron_data.tokenizers import gpt2_tokenizer

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


def test_gpt2s_two_files_are_read_as_the_library_does(files):
    vocab, merges = files / "vocab.json", files / "merges.txt"
    theirs = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))
    theirs.add_special_tokens(["<|endoftext|>"])
    ours = gpt2_tokenizer(vocab, merges)
    end = json.loads(vocab.read_text())["<|endoftext|>"]
    assert ours.eod_id == ours.eos_id == end and ours.vocab_size == 290
    for text in [
        *TEXT,
        "unseen words, and<|endoftext|>an end",
        "a <|endoftext|> b",
        "  spaces\n\ttabs  ",
    ]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def test_the_definition_is_that_of_the_library(files):
    """The fingerprint depends on all of it, also on what changes no token."""
    vocab, merges = files / "vocab.json", files / "merges.txt"
    library = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges))
    library.add_special_tokens(["<|endoftext|>"])
    ours, theirs = gpt2_tokenizer(vocab, merges).definition, json.loads(library.to_str())
    for part in ("added_tokens", "pre_tokenizer"):
        assert json.loads(ours)[part] == theirs[part]
    assert json.loads(ours)["model"]["vocab"] == theirs["model"]["vocab"]
    assert "Ġ".encode() in ours  # no escapes


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("{", "a b", r"vocab is not JSON"),
        ("[1]", "a b", "does not map tokens to token ids"),
        ('{"a": 0}', "a b", r"lacks <\|endoftext\|>"),
        (
            '{"a": 0, "b": 1, "<|endoftext|>": 2}',
            "#version\na b",
            r"merges, line 2: 'a b' does not",
        ),
        ('{"a": 0, "<|endoftext|>": 1}', "a a a", "line 1: 'a a a'"),
        ('{"a": 0, "aaa": 2, "<|endoftext|>": 1}', "a a a", "line 1: 'a a a'"),
        ('{"a": 0, "<|endoftext|>": 1}', "\n\na", "line 3: 'a' does not merge two"),
        ('{"a": "0", "<|endoftext|>": 1}', "", "does not map tokens to token ids"),
        ('{"a": true, "<|endoftext|>": 1}', "", "does not map tokens to token ids"),
        ('{"a": 0, "<|endoftext|>": 1}', b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_invalid_files_are_reported(tmp_path, vocab, merges, message):
    (tmp_path / "vocab").write_text(vocab)
    (tmp_path / "merges").write_bytes(merges if isinstance(merges, bytes) else merges.encode())
    with pytest.raises(DataError, match=message):
        gpt2_tokenizer(tmp_path / "vocab", tmp_path / "merges")


def test_megatrons_own_command_line(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"src": "www", "text": text, "id": 1}) for text in TEXT]
    (tmp_path / "my-corpus.json").write_text("\n".join(lines) + "\n")
    vocab, merges = str(files / "vocab.json"), str(files / "merges.txt")
    words = ["--vocab-file", vocab, "--merge-file", merges, "--append-eod"]
    source = ["--input", "my-corpus.json", "--output-prefix", "my-gpt2"]
    kind = ["--tokenizer-type", "GPT2BPETokenizer"]
    assert main(["preprocess", *source, *kind, *words]) == 0
    tokenizer = gpt2_tokenizer(vocab, merges)
    with IndexedDataset("my-gpt2_text_document") as dataset:
        for index, text in enumerate(TEXT):
            expected = [*tokenizer.encode(text), tokenizer.eod_id]
            np.testing.assert_array_equal(dataset[index], expected)
    capsys.readouterr()
    assert main(["inspect", "my-gpt2_text_document", *words[:4]]) == 0
    assert "the whale" in capsys.readouterr().out
    assert main(["preprocess", *source, *kind, "--vocab-file", vocab]) == 2
    assert "GPT2BPETokenizer needs --merge-file" in capsys.readouterr().err
