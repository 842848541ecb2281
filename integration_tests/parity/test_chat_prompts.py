"""A chat has the prompts of `apply_chat_template`, from every kind of file with a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_families import FAMILIES, save_family
from megatron_ckpt import export_hf, import_hf
from megatron_data import load_tokenizer
from megatron_infer import load_model
from megatron_infer.conversation import choose_prompts

transformers = pytest.importorskip("transformers")

# The token that ends a generated answer.
ENDS = {
    "chatml": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "llama2": "</s>",
    "glm4": "<|user|>",
    "qwen3": "<|im_end|>",
    "r1": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "phi3": "<|end|>",
    "phi4": "<|im_end|>",
    "zephyr": "</s>",
    "command-r": "<|END_OF_TURN_TOKEN|>",
    "mistral-tools": "</s>",
    "gpt-oss": "<|return|>",
    "olmo": "<|endoftext|>",
}
LINES = ("a", "  b?\n", "<tag> c")


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_families(name: str, tmp_path: Path) -> None:
    save_family(FAMILIES[name], tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    tokenizer: Any = load_tokenizer(tmp_path)
    prompts = choose_prompts(tokenizer)
    messages: list[dict[str, str]] = []
    for line in LINES:
        messages.append({"role": "user", "content": line})
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert prompts.prompt(line, 10_000) == expected
        answer = f"<think>\nhm\n</think>\n\nyes {line}"
        prompts.answered([1], answer)
        messages.append({"role": "assistant", "content": answer})
    stop = ENDS.get(name)
    assert {tokenizer.token(number) for number in prompts.stop_tokens} == (
        {stop} if stop else set()
    )


def test_templates_survive_every_conversion(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.save_pretrained(folder)
    save_family(FAMILIES["gemma"], folder)
    other = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text(other)
    (folder / "chat_template.jinja").write_text(FAMILIES["gemma"].template)
    import_hf(folder, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "back")
    expected = {"default": FAMILIES["gemma"].template, "tool_use": other}
    for path in (folder, tmp_path / "run", tmp_path / "back"):
        tokenizer: Any = load_model(path).tokenizer
        assert tokenizer.templates.sources == expected
        assert tokenizer.decode(choose_prompts(tokenizer).prompt("Hi", 99)) == (
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
        )
    config = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "back"))
    assert theirs.chat_template == expected
    assert config["bos_token"] == "<bos>"
