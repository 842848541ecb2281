"""Megatron's prompt formats: chat templates of families of models, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

SFTPromptFormat: TypeAlias = Literal[
    "default", "nemotron-h-aligned", "nemotron-nano-v2", "identity"
]
MultimodalPromptFormat: TypeAlias = Literal[
    "mistral",
    "llama3",
    "llama3p1",
    "llama3p2",
    "nvlm-yi-34b",
    "chatml",
    "nemotron5",
    "nemotron5-aligned",
    "qwen2p0",
    "qwen2p5",
    "nemotron6-moe",
]

DEFAULT_FORMAT: Literal["default"] = "default"
"""The prompt format that uses the template in the tokenizer's folder."""


@dataclass(frozen=True)
class PromptFormat:
    """A chat template with its settings.

    Attributes:
        template: A chat template with `{% generation %}` blocks; None for that of the tokenizer.
        pad_token: The padding token; None for that of the tokenizer.
        system: Whether a system message is rendered; otherwise a leading one is dropped.
        system_message: The system message of `--force-system-message`, or None.
    """

    template: str | None = None
    pad_token: str | None = None
    system: bool = True
    system_message: str | None = None


_NEMOTRON_H = """\
{% for message in messages %}
{% set text = message.content | trim %}
{% if message.role == 'system' %}
{{- '<SPECIAL_10>System\\n' + text + '\\n' -}}
{% elif message.role == 'user' %}
{{- '<SPECIAL_11>User\\n' + text + '\\n<SPECIAL_11>Assistant\\n' -}}
{% elif message.role == 'assistant' %}
{% generation %}{{- text + '\\n' -}}{% endgeneration %}
{% endif %}
{% endfor %}"""

_NEMOTRON_NANO = """\
{% for message in messages %}
{% set said = message.content %}
{% set text = said | replace('/think', '') | replace('/no_think', '') | trim %}
{% if message.role == 'system' %}
{{- '<SPECIAL_10>System\\n' + text + '\\n' -}}
{% elif message.role == 'user' %}
{{- '<SPECIAL_11>User\\n' + text + '\\n' -}}
{% elif message.role == 'assistant' %}
{{- '<SPECIAL_11>Assistant\\n' -}}
{% generation %}{{- said | trim + '\\n<SPECIAL_12>\\n' -}}{% endgeneration %}
{% endif %}
{% endfor %}"""

_IDENTITY = """\
{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}{{- message.content -}}{% endgeneration %}
{% else %}
{{- message.content -}}
{% endif %}
{% endfor %}"""

_MISTRAL = """\
{{- bos_token -}}
{% for message in messages %}
{% if message.role == 'user' %}
{{- '[INST] ' + message.content + '[/INST]' -}}
{% elif message.role == 'assistant' %}
{% generation %}{{- ' ' + message.content + eos_token -}}{% endgeneration %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{- ' ' -}}{% endif %}"""

_CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' -}}
{% if message.role == 'assistant' %}
{% generation %}{{- message.content + '<|im_end|>\\n' -}}{% endgeneration %}
{% else %}
{{- message.content + '<|im_end|>\\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif %}"""

_CHATML_WITH_BOS = "{{- bos_token -}}\n" + _CHATML

_NEMOTRON_5 = _CHATML_WITH_BOS.replace("<|im_start|>", "<SPECIAL_14>").replace(
    "<|im_end|>", "<SPECIAL_15>"
)

_NEMOTRON_5_ALIGNED = """\
{{- bos_token -}}
{% for message in messages %}
{{- message.role[:1] | upper + message.role[1:] + '\\n' -}}
{% if message.role | lower == 'assistant' %}
{% generation %}{{- message.content + '\\n[PREFIX]' -}}{% endgeneration %}
{% else %}
{{- message.content + '\\n[PREFIX]' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{- 'Assistant\\n' -}}{% endif %}"""

_LLAMA_3_1 = """\
{{- bos_token -}}
{% for message in messages %}
{% set role = 'ipython' if message.role in ('ipython', 'tool') else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{% if role == 'ipython' %}
{{- message.content | tojson + '<|eot_id|>' -}}
{% elif role == 'assistant' and message.tool_calls is defined %}
{% if message.tool_calls | length != 1 %}
{{- raise_exception('llama3p1 has room for one tool call in a message') -}}
{% endif %}
{% set call = message.tool_calls[0].function %}
{% generation %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson -}}
{{- '}<|eot_id|>' -}}
{% endgeneration %}
{% elif role == 'assistant' %}
{% generation %}{{- message.content | trim + '<|eot_id|>' -}}{% endgeneration %}
{% else %}
{{- message.content | trim + '<|eot_id|>' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{% endif %}"""

_QWEN = PromptFormat(
    _CHATML,
    system_message="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)
_LLAMA = PromptFormat(_LLAMA_3_1, "<|finetune_right_pad_id|>")

PROMPT_FORMATS: Mapping[SFTPromptFormat, PromptFormat] = {
    DEFAULT_FORMAT: PromptFormat(),
    "nemotron-h-aligned": PromptFormat(_NEMOTRON_H, "<SPECIAL_233>"),
    "nemotron-nano-v2": PromptFormat(_NEMOTRON_NANO, "<unk>"),
    "identity": PromptFormat(_IDENTITY, "<unk>"),
}
"""Prompt formats by the names of Megatron's `--sft-tokenizer-prompt-format`."""

MULTIMODAL_PROMPT_FORMATS: Mapping[MultimodalPromptFormat, PromptFormat] = {
    "mistral": PromptFormat(_MISTRAL, "<unk>", system=False),
    "llama3": PromptFormat(pad_token="<|end_of_text|>"),
    "llama3p1": _LLAMA,
    "llama3p2": _LLAMA,
    "nvlm-yi-34b": PromptFormat(_CHATML_WITH_BOS),
    "chatml": PromptFormat(),
    "nemotron5": PromptFormat(_NEMOTRON_5, "<SPECIAL_233>"),
    "nemotron5-aligned": PromptFormat(_NEMOTRON_5_ALIGNED, "<SPECIAL_233>"),
    "qwen2p0": _QWEN,
    "qwen2p5": _QWEN,
    "nemotron6-moe": PromptFormat(pad_token="<unk>"),
}
"""Prompt formats by the names of Megatron's `--tokenizer-prompt-format`."""
