"""Small chat templates in the manner of families of published models, written for tests."""

# ruff: noqa: RUF001 - tokens of DeepSeek

import json
import re
from pathlib import Path
from typing import NamedTuple

_MARKER = re.compile(r"<[|｜/]?[\w▁]+[|｜]?>|\[/?[A-Z_]+\]")
_ROLES = {"<|user|>", "<|assistant|>", "<|CHATBOT_TOKEN|>"}
_TEXTS = {"<think>", "</think>", "<tool_call>"}


class Family(NamedTuple):
    """A template with its special tokens."""

    template: str
    eos: str
    bos: str | None = None


FAMILIES = {
    "chatml": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
        "'<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "gemma": Family(
        "{{ bos_token }}"
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == "
        "'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<eos>",
        "<bos>",
    ),
    "llama3": Family(
        "{{ bos_token }}"
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
        "'<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ "
        "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{% endif %}",
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "llama2": Family(
        "{% for m in messages %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        "</s>",
        "<s>",
    ),
    "glm4": Family(
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|endoftext|>",
    ),
    "qwen3": Family(
        "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
        "{%- if m.role == 'assistant' %}{%- set content = m.content %}"
        "{%- set r = m.reasoning_content or '' %}{%- if '</think>' in content %}"
        "{%- set r = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{%- if loop.index0 > ns.last %}"
        "{%- if loop.last or r %}{{- '<|im_start|>assistant\n<think>\n' + r + "
        "'\n</think>\n\n' + content }}"
        "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
        "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
        "{%- if m.tool_calls %}"
        "{%- for t in m.tool_calls %}{{- '\n<tool_call>\n' + t.function.name + "
        "'\n</tool_call>' }}"
        "{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
        "<|im_end|>",
    ),
    "r1": Family(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'assistant' %}{% set c = m.content %}{% if '</think>' in c %}"
        "{% set c = c.split('</think>')[-1] %}"
        "{% endif %}{{ '<｜Assistant｜>' + c + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
    ),
    "phi3": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}",
        "<|endoftext|>",
    ),
    "phi4": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content "
        "+ '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}"
        "{% endif %}",
        "<|im_end|>",
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        "{% endfor %}",
        "</s>",
        "<s>",
    ),
    "command-r": Family(
        "{{ bos_token }}"
        "{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|><|' + ('CHATBOT' if m.role "
        "== 'assistant' else m.role | upper) + '_TOKEN|>' + m.content | trim + "
        "'<|END_OF_TURN_TOKEN|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
        "{% endif %}",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
    ),
    "mistral-tools": Family(
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{{- "
        "bos_token }}"
        "{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + "
        "'[/AVAILABLE_TOOLS]' }}"
        "{%- endif %}{{- '[INST] ' + m.content + '[/INST]' }}"
        "{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}",
        "</s>",
        "<s>",
    ),
    "gpt-oss": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking and loop.last %}{{ "
        "'<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
        "{% endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content "
        "}}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}"
        "{% endif %}",
        "<|return|>",
    ),
    "olmo": Family(
        "{{ eos_token }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + (eos_token if "
        "not loop.last else eos_token) + ('\n' if not loop.last else '') }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
        "{% endfor %}",
        "<|endoftext|>",
        "<|endoftext|>",
    ),
    "plain": Family(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "</s>",
        "<s>",
    ),
}


def save_family(family: Family, folder: Path) -> None:
    """Writes a tokenizer of bytes with the special tokens of a family, and its template."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {*_MARKER.findall(family.template), family.eos, *filter(None, [family.bos]), *_ROLES}
    special = [AddedToken(name, special=True, normalized=False) for name in sorted(names - _TEXTS)]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos}
    config |= {"chat_template": family.template} | ({"bos_token": family.bos} if family.bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
