"""Datasets of another tokenizer are refused, and so are outputs that exist."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    ICTDatasetConfig,
    Tokenizer,
    TokenizerMismatchError,
    build_ict_datasets,
    load_tokenizer,
    preprocess,
    train_bpe,
)
from megatron_data.cli import main
from megatron_data.datasets import Blend, WordPieces, check_tokenizer, summarize_blend
from megatron_data.tokenizers import NullTokenizer

Write = Callable[..., str]
LINES = [b'{"text": "1 2 3"}\n', b'{"text": "2 3 1"}\n', b'{"text": "3"}\n']


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str, Tokenizer], str]:
    """Preprocesses a few lines with a tokenizer and returns the prefix."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(LINES))

    def made(name: str, tokenizer: Tokenizer) -> str:
        return preprocess([tmp_path / "a.jsonl"], tmp_path / name, tokenizer)[0].prefix

    return made


def test_sources_of_another_tokenizer_are_refused(make: Callable[[str, Tokenizer], str]) -> None:
    null, other, same = (
        make(name, NullTokenizer(size)) for name, size in (("a", 9), ("b", 8), ("c", 9))
    )
    run = NullTokenizer(9)
    check_tokenizer(["1", null, "2", same], run)
    check_tokenizer({"train": null, "valid": [same], "test": None}, None)
    wrong = r"b_text_document was made with tokenizer null:8, not with null:9; give the tokenizer"
    with pytest.raises(TokenizerMismatchError, match=wrong):
        check_tokenizer(["1", null, "2", other], run)
    with pytest.raises(DataError, match=wrong):
        check_tokenizer({"train": null, "valid": [other]}, run)
    with pytest.raises(DataError, match=wrong):
        check_tokenizer(null, run, data_path_changes=[(80, ["0.5", same, "0.5", other])])
    with pytest.raises(DataError, match=r"b_.* with tokenizer null:8, .*a_text_document with null"):
        check_tokenizer([null, other], None)
    with pytest.raises(DataError, match=r"with tokenizer null:8"):
        summarize_blend(Blend((null, other), None), 1, 1)
    with pytest.raises(DataError, match=r"with tokenizer null:8"):
        pieces, config = WordPieces([False] * 9, 1, 2, 3), ICTDatasetConfig(9)
        build_ict_datasets(null, "1,0,0", titles={null: other}, config=config, word_pieces=pieces)


def test_sources_without_a_manifest_are_named_in_one_line(
    make: Callable[[str, Tokenizer], str], write_dataset: Write, caplog: pytest.LogCaptureFixture
) -> None:
    foreign, more = write_dataset([[1]], "foreign"), write_dataset([[1]], "more")
    with caplog.at_level(logging.WARNING):
        check_tokenizer(make("a", NullTokenizer(9)), NullTokenizer(9))
        check_tokenizer("talks.jsonl", NullTokenizer(9))  # no tokens yet
        check_tokenizer(foreign, None)  # nothing to compare
    assert not caplog.messages
    check_tokenizer(["1", foreign, "2", more], NullTokenizer(9))
    (line,) = caplog.messages
    assert line.startswith(f"{foreign} and 1 more: without a manifest (.meta.json)")
    caplog.clear()
    check_tokenizer([foreign, more], None)  # two datasets are compared
    check_tokenizer(foreign, NullTokenizer(9))
    named = [line.partition(": ")[0] for line in caplog.messages]
    assert named == [f"{foreign} and 1 more", foreign]


CONFIG, BASE = "tokenizer_config.json", "megatron_base_fingerprint"


def test_the_fingerprint_survives_saving_and_added_tokens(
    make: Callable[[str, Tokenizer], str], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """Saving preserves it, and with added special tokens older datasets still match."""
    corpus = make("a", tokenizer)
    tokenizer.save(tmp_path / "saved")
    check_tokenizer(corpus, load_tokenizer(tmp_path / "saved"))
    extended = tokenizer.with_special_tokens(["<fim_prefix>"]).with_special_tokens(["<x>"])
    check_tokenizer(corpus, extended)
    extended.save(tmp_path / "extended")
    check_tokenizer(corpus, load_tokenizer(tmp_path / "extended"))
    again = [json.loads((tmp_path / name / CONFIG).read_text()) for name in ("saved", "extended")]
    assert [config.get(BASE) for config in again] == [None, tokenizer.fingerprint]
    with pytest.raises(TokenizerMismatchError):
        check_tokenizer(make("b", extended), tokenizer)
    with pytest.raises(TokenizerMismatchError):
        check_tokenizer(corpus, train_bpe(["another text altogether"] * 9, 270))


def test_commands_do_not_replace_existing_outputs(
    make: Callable[[str, Tokenizer], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, made = str(tmp_path / "a.jsonl"), make("a", NullTokenizer(9))
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "7"]
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}'
    )
    train_bpe(["user assistant"], 270).save(tmp_path / "chat")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (tmp_path / "t.txt").write_text("1 2")
    (pictures / "t.gif").write_bytes(b"GIF89a")
    out = str(tmp_path / "o")
    commands = {
        "train-tokenizer": ["--input", text, "--vocab-size", "270", "--output", f"{out}_t"],
        "preprocess": ["--input", text, "--output-prefix", out, *null],
        "tokenize-conversations": [
            *("--input", str(tmp_path / "chat.jsonl"), "--output-prefix", out),
            *("--tokenizer-model", str(tmp_path / "chat")),
            *("--sft-tokenizer-prompt-format", "identity"),
        ],
        "tokenize-images": [
            *("--input", str(tmp_path / "t.txt"), "--input-image", str(pictures)),
            *("--output-prefix", out, *null),
        ],
        "merge": [made, "--output-prefix", f"{out}_m"],
        "split": [made, "--shares", "1", "2", "--output-prefixes", f"{out}_x", f"{out}_y"],
        "mix": [made, "--output", f"{out}.args"],
    }
    for name, words in commands.items():
        assert main([name, *words]) == 0, capsys.readouterr().err
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert main([name, *words]) == 1, name
        assert "exists" in (error := capsys.readouterr().err), error
        assert "--overwrite to replace" in error
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        assert main([name, *words, "--overwrite"]) == 0, capsys.readouterr().err


def test_overwriting_replaces_all_files_of_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ByteTokenizer().save(tmp_path / "t")
    (tmp_path / "a.txt").write_text("one text")
    command = ["train-tokenizer", "--input", str(tmp_path / "a.txt"), "--vocab-size", "270"]
    command += ["--output", str(tmp_path / "t")]
    assert main(command) == 1
    assert isinstance(load_tokenizer(tmp_path / "t"), ByteTokenizer)
    assert main([*command, "--overwrite"]) == 0
    assert isinstance(load_tokenizer(tmp_path / "t"), HuggingFaceTokenizer)


def test_an_interrupted_overwriting_run_resumes_without_overwrite(
    make: Callable[[str, Tokenizer], str], tmp_path: Path
) -> None:
    make("a", NullTokenizer(9))
    (tmp_path / "a.jsonl").write_bytes(b"".join(LINES) + b"no object\n")
    given = ([tmp_path / "a.jsonl"], tmp_path / "a", NullTokenizer(9))
    with pytest.raises(DataError, match="exists; give another output"):
        preprocess(*given, overwrite=False)
    assert not list(tmp_path.glob(".*.parts"))
    with pytest.raises(DataError, match="not JSON"):
        preprocess(*given, chunk_bytes=18)
    (tmp_path / "a.jsonl").write_bytes(b"".join(LINES) + b'{"text": "4"}\n')
    (made,) = preprocess(*given, chunk_bytes=18, overwrite=False)
    assert (made.resumed_chunks, made.counts.documents) == (3, 4)
    with pytest.raises(DataError, match="exists; give another output"):
        preprocess(*given, chunk_bytes=18, overwrite=False)


def test_an_extended_tokenizer_keeps_its_base_fingerprint(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    extended = tokenizer.with_special_tokens(["<more>"])
    assert extended.fingerprint != extended.base_fingerprint == tokenizer.fingerprint
    extended.save(tmp_path)
    for again in (pickle.loads(pickle.dumps(extended)), HuggingFaceTokenizer.load(tmp_path)):
        assert again.fingerprint == extended.fingerprint
        assert again.base_fingerprint == tokenizer.fingerprint
