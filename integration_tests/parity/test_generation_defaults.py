"""Settings beside the weights have the effect that they have in transformers.

The model always says the same token, so that only the settings decide when a text ends.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ckpt import export_hf, import_hf
from megatron_infer import generate, load_model
from megatron_infer.cli import main
from megatron_infer.conversation import choose_prompts
from megatron_infer.defaults import GenerationDefaults
from megatron_infer.generation_fields import (
    ANY_STRATEGY,
    APPLIED,
    SAMPLING_ONLY,
    WITHOUT_EFFECT,
)

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

START, FIRST, SECOND = 256, 257, 258
NEW = 6


def write(folder: Path, *, config: Any = None, generation: Any = None, starts: bool = True) -> Path:
    """Writes a model that always says token SECOND, and a tokenizer whose end is FIRST."""
    vocabulary = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(vocabulary)}, merges=[])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<|im_end|>", "<|stop|>"])
    if starts:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", START)]
        )
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=260,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.fill_(0.1)
        theirs.lm_head.weight.zero_()
        theirs.lm_head.weight[SECOND] = 1.0
    theirs.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        content.pop(name, None)
    (folder / "config.json").write_text(json.dumps(content | (config or {})))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    made.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"bos_token": "<s>"}))
    return folder


def their_tokens(folder: Path) -> tuple[list[int], int]:
    """Returns the prompt of transformers and the number of tokens before a stop token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("ab", return_tensors="pt").input_ids
    found = model.generate(prompt, do_sample=False, max_new_tokens=NEW)[0, prompt.shape[1] :]
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return prompt[0].tolist(), sum(token not in ends for token in found.tolist())


CASES: dict[str, dict[str, Any]] = {
    "list in config.json": {"config": {"eos_token_id": [FIRST, SECOND]}},
    "list in generation_config.json": {"generation": {"eos_token_id": [FIRST, SECOND]}},
    "the second file has no effect": {
        "config": {"eos_token_id": [FIRST, SECOND]},
        "generation": {"eos_token_id": FIRST},
    },
    "an end only in config.json": {
        "config": {"eos_token_id": SECOND},
        "generation": {"pad_token_id": 0},
    },
    "no start": {"generation": {"eos_token_id": SECOND}, "starts": False},
}


@pytest.mark.parametrize("name", CASES)
def test_texts_start_and_end_as_in_transformers(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "theirs", **CASES[name])
    prompt, count = their_tokens(folder)
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "back")
    for path in (folder, tmp_path / "run", tmp_path / "back"):
        loaded = load_model(path)
        seen: list[list[int]] = []
        loaded.model.register_forward_pre_hook(
            lambda _, inputs, seen=seen: seen.append(inputs[0].flatten().tolist())
        )
        (found,) = generate(
            loaded.stages,
            loaded.tokenizer,
            ["ab"],
            loaded.defaults.sampling_params(temperature=0.0, max_new_tokens=NEW),
            stop=loaded.stop_tokens,
            special_tokens=loaded.defaults.adds_special_tokens,
        )
        assert len(found.tokens) == count
        assert seen[0] == prompt
        options = ["--prompt", "ab", "--temperature", "0", "--max-new-tokens", str(NEW)]
        assert main(["generate", "--load", str(path), *options]) == 0
        assert capsys.readouterr().out.count("<|stop|>") == count


@pytest.mark.parametrize(
    "generation",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 20, "max_new_tokens": 5},
    ],
)
def test_sampling_is_that_of_transformers(tmp_path: Path, generation: dict[str, Any]) -> None:
    folder = write(tmp_path / "theirs", generation=generation)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs, _ = model._prepare_generation_config(None)
    ours = load_model(folder).defaults.params
    assert {key: getattr(theirs, key) for key in ours} == ours


def test_a_plain_chat_starts_like_a_prompt(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs")
    loaded = load_model(folder)
    prompts = choose_prompts(loaded.tokenizer, "plain", special_tokens=True)
    assert prompts.prompt("ab", 20) == their_tokens(folder)[0]
    assert START not in prompts.prompt("c", 20)[1:]
    prompts.clear()
    assert prompts.prompt("ab", 20)[0] == START
    assert START not in choose_prompts(loaded.tokenizer, "plain").prompt("ab", 20)


def test_every_field_of_transformers_is_decided() -> None:
    fields = vars(transformers.GenerationConfig())
    tables = (APPLIED, SAMPLING_ONLY.keys(), ANY_STRATEGY.keys(), WITHOUT_EFFECT)
    assert not fields.keys() - {name for table in tables for name in table}
    defaults = transformers.GenerationConfig._get_default_generation_params()
    for name, neutral in {**SAMPLING_ONLY, **ANY_STRATEGY}.items():
        if defaults.get(name) is not None:
            assert defaults[name] in neutral
    assert GenerationDefaults().sampling_params().temperature == 1.0
