"""What an import says about the tokenizer of a folder."""

import json
import sys
from pathlib import Path

import pytest
from megatron_ckpt.formats.notes import tokenizer_notes
from megatron_ckpt.formats.tokenizer_classes import class_note, rebuilding_class, rebuilt


def definition(pre_tokenizer: dict, normalizer: dict | None = None) -> dict:
    vocab = {"a": 0, "b": 1}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "fuse_unk": False},
    }


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("kind", "named", "expected"),
    [
        ("llama", "GPT2TokenizerFast", "GPT2Tokenizer"),
        ("llama", "PreTrainedTokenizerFast", None),
        ("olmo2", "GPT2Tokenizer", None),
        ("qwen2", "GPT2Tokenizer", "Qwen2Tokenizer"),
        ("qwen3", "GPT2Tokenizer", "GPT2Tokenizer"),
        ("gemma3_text", None, "GemmaTokenizer"),
        (None, None, None),
    ],
)
def test_the_class_is_that_of_transformers(kind: str, named: str, expected: str | None) -> None:
    assert rebuilding_class({"model_type": kind}, {"tokenizer_class": named}) == expected


def files(content: dict, name: str, **settings: object) -> dict[str, bytes]:
    return {
        "tokenizer.json": json.dumps(content).encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": name, **settings}).encode(),
    }


def test_equal_parts_need_no_note() -> None:
    assert class_note(files(definition(BYTES), "GPT2Tokenizer")) is None
    assert class_note(files(definition(BYTES), "PreTrainedTokenizerFast")) is None
    assert class_note(files(definition(BYTES), "LlamaTokenizer")) is None
    assert class_note({}) is None


def test_without_the_library_the_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    note = class_note(files(definition(BYTES), "GPTNeoXTokenizer"))
    assert note is not None and "by those of GPTNeoXTokenizer (normalizer)" in note
    assert "install megatron-ckpt[tokenizers]" in note


def test_add_prefix_space_comes_from_the_settings() -> None:
    made = rebuilt(definition(BYTES), "GPT2Tokenizer", {"add_prefix_space": True})
    assert made["pre_tokenizer"]["add_prefix_space"]
    assert rebuilt(made, "LlamaTokenizer", {})["pre_tokenizer"]["prepend_scheme"] == "first"


def test_files_that_are_left_out_are_named(tmp_path: Path) -> None:
    for name in ("tekken.json", "tokenizer.model", "tokenizer.model.v3", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    kept = {"tokenizer/tokenizer.model": tmp_path / "tokenizer.model"}
    left, alone = tokenizer_notes(tmp_path, kept)
    assert left.endswith("not kept in the checkpoint: tekken.json, tokenizer.model.v3")
    assert "has no tokenizer.json, only tokenizer.model; " in alone
