"""Classes of transformers that replace parts of a ``tokenizer.json``: same class, same ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron_ckpt.cli import main
from megatron_ckpt.formats.tokenizer_classes import (
    _DISTRUSTED,
    _GENERIC,
    CLASSES,
    PROBE,
    REGISTERED,
    class_note,
    rebuilding_class,
    rebuilt,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [*PROBE] * 3 + ["the whale and the sea, I'LL 1234 don't"] * 5
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(*, digits: bool) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = level
    if digits:
        single = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([single, level])
        made.normalizer = tokenizers.normalizers.NFC()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return trained(made, SPECIAL, alphabet)


def sentence_piece() -> Any:
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = tokenizers.normalizers
    made.normalizer = steps.Sequence([steps.Prepend("\u2581"), steps.Replace(" ", "\u2581")])
    return trained(made, [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))], [])


def trained(made: Any, special: list[str], alphabet: list[str]) -> Any:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer=trainer)
    return made


KINDS = {
    "bytes": lambda: byte_level(digits=False),
    "digits": lambda: byte_level(digits=True),
    "pieces": sentence_piece,
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    made, noted = KINDS[kind](), 0
    for name in (*CLASSES, "PreTrainedTokenizerFast"):
        for model_type in ("llama", "gpt2", "qwen2", "olmo2"):
            folder = tmp_path / f"{name}-{model_type}"
            folder.mkdir()
            made.save(str(folder / "tokenizer.json"))
            settings = {"tokenizer_class": name, "unk_token": "<unk>", "bos_token": "<s>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            content = json.loads((folder / "tokenizer.json").read_text())
            chosen = rebuilding_class({"model_type": model_type}, settings)
            if chosen == "LlamaTokenizer" and kind != "pieces":
                chosen = None
            assert type(theirs).__name__ == (chosen or "TokenizersBackend")
            ours = made
            if chosen is not None:
                ours = tokenizers.Tokenizer.from_str(json.dumps(rebuilt(content, chosen, settings)))
            differs = False
            for text in PROBE:
                ids = theirs(text, add_special_tokens=False).input_ids
                assert ids == ours.encode(text, add_special_tokens=False).ids
                differs |= ids != made.encode(text, add_special_tokens=False).ids
            note = class_note({file.name: file.read_bytes() for file in folder.iterdir()})
            assert (note is not None) == differs
            noted += differs
    assert noted > 3


def test_the_table_of_types_is_that_of_transformers() -> None:
    from transformers.models.auto import tokenization_auto as auto

    for model_type, name in REGISTERED.items():
        assert auto.TOKENIZER_MAPPING_NAMES[model_type] == name
    known = set(REGISTERED) & auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert known == set(_DISTRUSTED)
    assert _GENERIC == "TokenizersBackend"


def test_convert_warns_with_an_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=400,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    byte_level(digits=True).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()
    (warning,) = [line for line in lines if "warning" in line]
    assert warning.startswith(f"megatron-ckpt: warning: {folder}: transformers 5 replaces parts of")
    assert "those of GPT2Tokenizer: '" in warning and "] there and [" in warning
    assert main(["convert", "--to-hf", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back" / "additional_chat_templates" / "tool.jinja").is_file()
    shutil.rmtree(tmp_path / "run")
    (folder / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "{_GENERIC}"}}')
    capsys.readouterr()
    assert main(["convert", "--from-hf", str(folder), str(tmp_path / "run")]) == 0
    assert "warning" not in capsys.readouterr().err
