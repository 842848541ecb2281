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
    names = ("tekken.json", "tokenizer.model", "tokenizer.model.v3", "VOCAB.bin")
    for name in (*names, "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    kept = {"tokenizer/tokenizer.model": tmp_path / "tokenizer.model"}
    left, alone = tokenizer_notes(tmp_path, kept)
    assert left.endswith("not kept in the checkpoint: VOCAB.bin, tekken.json, tokenizer.model.v3")
    assert "has no tokenizer.json, only tokenizer.model; " in alone


def test_a_text_with_other_ids_is_shown_with_both() -> None:
    pytest.importorskip("tokenizers")
    given = definition({**BYTES, "add_prefix_space": True})
    given["model"]["vocab"]["\u0120"] = 2  # a space
    first, text = (
        {"SpecialToken": {"id": "b", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    given["post_processor"] = {  # the ids are those without the tokens that it adds
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"b": {"id": "b", "ids": [1], "tokens": ["b"]}},
    }
    note = class_note(files(given, "GPT2Tokenizer"))
    assert note is not None
    assert "replaces parts of tokenizer.json by those of GPT2Tokenizer: 'a' is [0] there" in note
    assert "and [2, 0] here, as the file says" in note
    # Parts that differ without an effect on any text, and files that no library reads.
    without = {**definition(BYTES), "normalizer": {"type": "NFC"}}
    assert class_note(files(without, "GPT2Tokenizer")) is None
    broken = definition({"type": "NoSuchKind"})
    assert class_note(files(broken, "GPT2Tokenizer")) is None


@pytest.mark.parametrize(
    ("name", "settings", "unknown"),
    [
        ("GPT2Tokenizer", {"unk_token": "b"}, None),
        ("LlamaTokenizer", {"unk_token": "b"}, None),
        ("GemmaTokenizer", {"unk_token": {"content": "b"}}, "b"),
        ("CodeLlamaTokenizer", {}, "<unk>"),
    ],
)
def test_the_model_of_a_class_replaces_that_of_the_file(
    name: str, settings: dict, unknown: str | None
) -> None:
    given = definition(BYTES)
    given["model"] |= {"dropout": 0.5, "ignore_merges": True, "unk_token": "a"}
    pieces = name != "GPT2Tokenizer"
    assert rebuilt(given, name, settings)["model"] == {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1},
        "merges": [],
        "dropout": None,
        "ignore_merges": False,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": pieces,
        "byte_fallback": pieces,
        "unk_token": unknown,
    }


def split(pattern: dict, behavior: str) -> dict:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


@pytest.mark.parametrize("name", ["GPT2", "Roberta", "GPTNeoX", "Qwen2", "Cohere"])
@pytest.mark.parametrize("space", [None, False, True])
def test_classes_of_bytes_split_as_in_transformers(name: str, space: bool | None) -> None:
    """No space is put before a text unless the settings demand it."""
    settings = {} if space is None else {"add_prefix_space": space}
    made = rebuilt(definition({"type": "Digits"}), f"{name}Tokenizer", settings)
    parts = made["pre_tokenizer"].get("pretokenizers", [made["pre_tokenizer"]])
    assert parts[-1] == {**BYTES, "add_prefix_space": space is True, "use_regex": name != "Qwen2"}
    if name == "Qwen2":
        assert parts[0] == split(parts[0]["pattern"], "Isolated")
        assert parts[0]["pattern"]["Regex"].count("{N}|") == 1  # single digits
    elif name == "Cohere":
        assert parts[0] == {"type": "Digits", "individual_digits": True}
    assert len(parts) == 1 + (name in ("Qwen2", "Cohere"))
    normalized = name in ("GPTNeoX", "Qwen2", "Cohere")
    assert made["normalizer"] == ({"type": "NFC"} if normalized else None)


def test_classes_of_pieces_mark_spaces_as_in_transformers() -> None:
    given = definition(BYTES)
    made = rebuilt(given, "GemmaTokenizer", {})
    assert made["normalizer"] == {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": "\u2581",
    }
    assert made["pre_tokenizer"] == split({"String": " "}, "MergedWithPrevious")
    for name in ("LlamaTokenizer", "CodeLlamaTokenizer"):
        for settings, scheme in (({}, "first"), ({"add_prefix_space": False}, "never")):
            made = rebuilt(given, name, settings)
            assert made["normalizer"] is None
            assert made["pre_tokenizer"] == {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": scheme,
                "split": False,
            }


def test_only_models_of_pairs_are_rebuilt() -> None:
    given = definition({**BYTES, "add_prefix_space": True})
    for model in (None, [], {**given["model"], "type": "Unigram"}):
        assert class_note(files({**given, "model": model}, "GPT2Tokenizer")) is None


def test_the_class_may_be_named_in_the_configuration() -> None:
    assert rebuilding_class({"tokenizer_class": "GPT2TokenizerFast"}, {}) == "GPT2Tokenizer"
    own = {"tokenizer_class": "LlamaTokenizer"}
    assert rebuilding_class({"tokenizer_class": "GPT2Tokenizer"}, own) == "LlamaTokenizer"
    assert rebuilding_class({"model_type": ["gpt2"]}, {"tokenizer_class": 3}) is None


def test_a_class_that_replaces_parts_is_named_with_the_folder(tmp_path: Path) -> None:
    given = definition({**BYTES, "add_prefix_space": True})
    given["model"]["vocab"]["\u0120"] = 2  # a space
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(given))
    kept: dict[str, Path | bytes] = {"tokenizer/tokenizer.json": path}
    assert tokenizer_notes(tmp_path, kept) == []
    settings = {"tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}'}
    config = {"huggingface/config.json": b'{"model_type": "gpt2"}'}
    for more in ({f"tokenizer/{name}": data for name, data in settings.items()}, config):
        (note,) = tokenizer_notes(tmp_path, {**kept, **more})
        start = "transformers 5 replaces parts of tokenizer.json by those of GPT2Tokenizer"
        assert note.startswith(f"{tmp_path}: {start}")


def test_complete_files_need_no_note(tmp_path: Path) -> None:
    names = ("tokenizer.json", "vocab.json", "README.md", "tokenizer.json.bak")
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    kept = {f"tokenizer/{name}": tmp_path / name for name in names[:2]}
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    kept["tokenizer/additional_chat_templates/rag.jinja"] = folder / "rag.jinja"
    assert tokenizer_notes(tmp_path, kept) == []
    folder.rmdir()
    assert tokenizer_notes(tmp_path, {"huggingface/config.json": b"{}"}) == [
        f"{tmp_path}: not kept in the checkpoint: tokenizer.json, vocab.json"
    ]
