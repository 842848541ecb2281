"""Tests of likely user errors of the commands: each gives one line and leaves no files."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import load_tokenizer, train_bpe
from megatron_data.cli import main
from megatron_data.order.cache import load_or_build
from megatron_data.tokenizers import ChatTemplate, huggingface

Capture = pytest.CaptureFixture[str]

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BYTES = "preprocess --input a.jsonl --tokenizer-type ByteTokenizer --output-prefix"
CHATS = "tokenize-conversations --input talks.jsonl --tokenizer-model tokenizer --output-prefix o"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus, a tokenizer, a dataset `d_text_document`, and invalid files."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    Path("talks.jsonl").write_text(json.dumps(TALK) + "\n")
    Path("packed.gz").write_bytes(gzip.compress(b"packed"))
    Path("list.json").write_text("[]")
    Path("open.jinja").write_text("{% for m in messages %}")
    Path("texts").mkdir()
    said = TALK["messages"]
    shouted = [{**message, "role": message["role"].title()} for message in said]
    Path("capital.jsonl").write_text(json.dumps({"messages": shouted}) + "\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, said[1]]
    Path("parts.jsonl").write_text(json.dumps({"messages": parts}) + "\n")
    Path("pairs.jsonl").write_text('{"text": "a", "picture": "texts"}\n')
    train_bpe(["one two three"], 260).save("tokenizer")
    assert main(f"{BYTES} d".split()) == 0
    Path("t_conversation.idx").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("verify d", 1, "d.idx and d.bin missing; did you mean d_text_document?"),
        ("verify t", 1, "did you mean t_conversation?"),
        (
            "verify t_conversation_loss_loss",
            1,
            "the prefix of a loss mask, which megatron-data tokenize-conversations",
        ),
        (
            "split d_text_document --shares 1 --output-prefixes o1 o2",
            1,
            "1 part for 2 outputs; give one for each",
        ),
        (
            "verify memory://d --object-storage-cache-path memory://cache",
            1,
            "memory://cache is a URL",
        ),
        ("verify memory://d --object-storage-cache-path a.jsonl", 1, "a.jsonl is a file"),
        (
            f"{CHATS} --input capital.jsonl --sft-tokenizer-prompt-format identity",
            1,
            "that the loss counts in capital.jsonl (1 without text of the role assistant ",
        ),
        (
            f"{CHATS} --sft-tokenizer-prompt-format identity --max-tokens 2 --over-length drop",
            1,
            "that the loss counts in talks.jsonl (1 longer than --max-tokens)",
        ),
        (
            f"{CHATS} --input parts.jsonl --sft-tokenizer-prompt-format identity",
            1,
            "it writes a content of several parts as a Python list",
        ),
        (
            "tokenize-images --input pairs.jsonl --tokenizer-model tokenizer --output-prefix o "
            "--json-key text picture",
            1,
            "pairs.jsonl:1: texts is a folder, not an image",
        ),
        (f"{BYTES} s3://bucket/o", 1, "s3://bucket/o is a URL, but files are written to local"),
        (
            f"{BYTES} texts/",
            1,
            "'texts/' is a folder; add a name for the files, such as texts/corpus",
        ),
        (f"{BYTES} .", 1, "'.' is a folder"),
        (f"{BYTES} o --json-keys text text", 1, "--json-keys text text: give each key once"),
        (f"{BYTES} o --max-document-bytes 0", 2, "--max-document-bytes 0; give at least 1"),
        (f"{BYTES} o --workers 0", 2, "--workers 0; give at least 1; see megatron-data preprocess"),
        (f"{BYTES} o --workers none", 2, "--workers needs an integer, got 'none'"),
        (
            "split d_text_document --shares 1 nan --output-prefixes x y",
            2,
            "--shares needs a finite number, got 'nan'",
        ),
        ("split d_text_document --documents 1 0 --output-prefixes x y", 2, "--documents 0; give"),
        ("split d_text_document --documents 1 1", 2, "--output-prefixes"),
        ("mix d_text_document --epochs 0", 2, "--epochs 0.0; give more than 0"),
        ("trace d_text_document --document -1", 2, "--document -1; give at least 0"),
        (f"{BYTES} file:///tmp/o", 1, "give the path /tmp/o"),
        (
            "train-tokenizer --input a.jsonl --vocab-size 300 --json-key body --output t",
            1,
            "a.jsonl:1: no key 'body' (keys here: 'text'); name the right one with --json-key\n",
        ),
        (
            "train-tokenizer --input gone.jsonl --vocab-size 300 --output a.jsonl",
            1,
            "a.jsonl cannot be a folder, because a.jsonl is a file; give another path",
        ),
        (
            "train-tokenizer --input a.jsonl --vocab-size 300 --output s3://bucket/t",
            1,
            "s3://bucket/t is a URL",
        ),
        (
            "preprocess --input a.jsonl --tokenizer-type TikTokenizer --tokenizer-model list.json "
            "--output-prefix o",
            1,
            "list.json: 0 tokens; a vocabulary begins with the 256 bytes",
        ),
        (
            "preprocess --input a.jsonl --tokenizer-model bert-base --output-prefix o",
            1,
            "bert-base does not exist; give a tokenizer.json or its folder (nothing is downloaded)",
        ),
        *(
            (
                f"preprocess --input a.jsonl {option} http://host/t --output-prefix o",
                1,
                "http://host/t is a URL, but tokenizers are read from local disks only; copy",
            )
            for option in (
                "--tokenizer-model",
                "--tokenizer-type Llama2Tokenizer --tokenizer-model",
                "--tokenizer-type BertWordPieceCase --vocab-file",
                "--merge-file list.json --vocab-file",
                "--tokenizer-model tokenizer --chat-template",
            )
        ),
        (
            "preprocess --input a.jsonl --tokenizer-type GPT2BPETokenizer --tokenizer-model "
            "tokenizer --output-prefix o",
            2,
            "--tokenizer-model does not go with --tokenizer-type GPT2BPETokenizer (takes "
            "--vocab-file, --merge-file, --tokenizer-special-tokens)",
        ),
        (
            "preprocess --input a.jsonl --vocab-file bert-vocab.txt --output-prefix o",
            2,
            "for BERT's vocab.txt give --tokenizer-type BertWordPieceLowerCase or BertWordPiece",
        ),
        (
            "preprocess --input a.jsonl --tokenizer-model tokenizer --output-prefix o "
            "--tokenizer-special-tokens=",
            1,
            "special tokens ['']: one of them is empty",
        ),
        (f"{CHATS} --chat-template packed.gz", 1, "packed.gz is not UTF-8 text (byte 1)"),
        (f"{CHATS} --chat-template open.jinja", 1, "open.jinja: not a chat template: line 1"),
        (f"{CHATS} --sft-tokenizer-prompt-format identity --max-tokens 1", 2, "at least 2"),
        ("inspect d_text_document --documents -1", 2, "--documents -1; give at least 0"),
        ("inspect d_text_document --tokens -1", 2, "--tokens -1; give at least 0"),
        ("inspect d_text_document --plot s3://bucket/x.svg", 1, "s3://bucket/x.svg is a URL"),
        ("split d_text_document --shares 1 1 --output-prefixes x texts/", 1, "is a folder; add"),
        ("merge d_text_document --output-prefix memory://x", 1, "memory://x is a URL"),
        ("mix --data-args-path packed.gz", 1, "packed.gz is not UTF-8 text (byte 1)"),
        ("mix memory://bucket/d", 1, "memory://bucket/d is a URL and needs a local cache folder"),
        (
            "bench --input a.jsonl --tokenizer-type ByteTokenizer --seq-length 0",
            2,
            "--seq-length 0; give at least 1",
        ),
        ("trace nowhere 1", 1, "no dataset at nowhere"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_files(
    command: str, status: int, message: str, place: Path, capsys: Capture
) -> None:
    if "--chat-template" in command or "--max-tokens" in command:
        pytest.importorskip("jinja2")
    before = sorted(place.rglob("*"))
    capsys.readouterr()
    assert main(command.split()) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("megatron-data: error: ")
    assert error.count("\n") == 1
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", r"tokenizer_config\.json is not a JSON object"),
        ('{"eos_token": 5}', r"tokenizer_config\.json: eos_token is 5, not a string"),
    ],
)
def test_an_invalid_tokenizer_config_is_reported(config: str, message: str, place: Path) -> None:
    Path("tokenizer/tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        load_tokenizer("tokenizer")


def test_trace_reports_a_missing_manifest(place: Path, capsys: Capture) -> None:
    Path("d_text_document.meta.json").unlink()
    assert main(["trace", "d_text_document", "1"]) == 1
    assert "d_text_document has no manifest d_text_document.meta.json" in capsys.readouterr().err


def test_a_memory_error_is_not_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not an error of the document, so skipping the document would lose it."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError), huggingface._library_errors("what"):
        fail()
    load_or_build(tmp_path, "key", lambda: {"a": np.zeros(2)})
    monkeypatch.setattr("megatron_data.order.cache._mapped", fail)
    with pytest.raises(MemoryError):
        load_or_build(tmp_path, "key", lambda: {"a": np.zeros(2)})
    pytest.importorskip("jinja2", reason="chat templates are an extra of this package")
    template = ChatTemplate("{{ messages }}")
    with monkeypatch.context() as patched:
        patched.setattr(template._template, "render", fail)
        with pytest.raises(MemoryError):
            template.render([{"role": "user", "content": ""}])
    monkeypatch.setattr("jinja2.Environment.compile", fail)
    with pytest.raises(MemoryError):
        ChatTemplate("{{ messages }}")
