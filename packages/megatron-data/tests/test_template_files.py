"""Chat templates in the files of a tokenizer's folder."""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron_data import DataError, HuggingFaceTokenizer, load_tokenizer
from megatron_data.tokenizers import (
    ChatTemplate,
    ImageTemplate,
    SFTTokenizer,
    conversation_tokenizer,
)

pytest.importorskip("jinja2")

TALK = [{"role": "user", "content": "a"}]


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


CONFIG = "tokenizer_config.json"
NAMED = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]
JINJA, MORE = "chat_template.jinja", "additional_chat_templates"


@pytest.mark.parametrize(
    ("files", "text", "with_tools"),
    [
        ({CONFIG: {"chat_template": "config"}}, "config", "config"),
        ({CONFIG: {"chat_template": NAMED}}, "config", "tools"),
        ({CONFIG: {"chat_template": {"default": "a", "tool_use": "b"}}}, "a", "b"),
        ({"chat_template.json": {"chat_template": "processor"}}, "processor", "processor"),
        ({CONFIG: {"chat_template": "c"}, "chat_template.json": {"chat_template": "p"}}, "c", "c"),
        ({CONFIG: {"chat_template": NAMED}, JINJA: "file"}, "file", "file"),
        ({JINJA: "file", f"{MORE}/tool_use.jinja": "tools", f"{MORE}/rag.jinja": "{{"}, "file",
         "tools"),
    ],
)  # fmt: skip
def test_the_first_file_with_a_template_counts(
    files: dict[str, Any], text: str, with_tools: str, tmp_path: Path
) -> None:
    template = ChatTemplate.load(write(tmp_path, files))
    for each in (template, pickle.loads(pickle.dumps(template)), ImageTemplate(template)):
        assert each.render(TALK).text == text
        assert each.render(TALK, tools=[{}]).text == with_tools
        assert each.render(TALK, tools=[]).text == with_tools
    assert (template.fingerprint != ChatTemplate(text).fingerprint) == (text != with_tools)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither chat_template.jinja nor chat_template in tokenizer_config.json or"),
        ({CONFIG: {"chat_template": [NAMED[1]]}}, r"\(only templates named tool_use\)"),
        ({f"{MORE}/rag.jinja": "x", CONFIG: {"chat_template": "c"}}, "only templates named rag"),
        ({CONFIG: {"chat_template": 7}}, "tokenizer_config.json: chat_template has .* 7"),
        ({CONFIG: {"chat_template": [{"name": "../a", "template": "x"}]}}, "the name of a file"),
        ({"chat_template.json": "[]"}, "chat_template.json is not a JSON object"),
    ],
)
def test_a_folder_without_a_usable_template_is_refused(
    files: dict[str, Any], message: str, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / CONFIG).unlink()
    write(tmp_path, files)
    with pytest.raises(DataError, match=message):
        ChatTemplate.load(tmp_path)
    loaded = load_tokenizer(tmp_path)  # text needs no template
    with pytest.raises(DataError, match=message):
        conversation_tokenizer(loaded)


def test_templates_get_the_special_tokens(tmp_path: Path) -> None:
    """As in transformers, a folder without `added_tokens_decoder` has them in another file, too."""
    source = "{{ bos_token }}|{{ unk_token }}|{{ add_bos_token }}|{{ cls_token }}"
    config = {"bos_token": {"content": "<s>"}, "unk_token": "<u>", "add_bos_token": True}
    config |= {"cls_token": None, "chat_template": source}
    write(tmp_path, {CONFIG: config, "special_tokens_map.json": {"unk_token": {"content": "<v>"}}})
    assert ChatTemplate.load(tmp_path).render(TALK).text == "<s>|<v>||"
    write(tmp_path, {CONFIG: {**config, "added_tokens_decoder": {}}})
    assert ChatTemplate.load(tmp_path).render(TALK).text == "<s>|<u>||"


def test_a_saved_tokenizer_keeps_its_templates(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    tokenizer.save(tmp_path / "a")
    tools = "{{ unk_token }}{{ eos_token }}"
    config = {"unk_token": "<u>", "eos_token": "<|endoftext|>"}
    config["chat_template"] = [NAMED[0], {"name": "tool_use", "template": tools}]
    loaded = load_tokenizer(write(tmp_path / "a", {CONFIG: config}))
    assert isinstance(loaded, HuggingFaceTokenizer)
    loaded.with_special_tokens(["<x>"]).save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert pickle.loads(pickle.dumps(again)).templates == loaded.templates == again.templates
    sft = conversation_tokenizer(again)
    sft.save(tmp_path / "c")
    for each in (conversation_tokenizer(load_tokenizer(tmp_path / "c")), sft):
        assert each.template.render(TALK).text == "config"
        assert each.template.render(TALK, tools=[{}]).text == "<u><|endoftext|>"
    SFTTokenizer(again, ChatTemplate("one")).save(tmp_path / "c")  # no template of before is left
    saved = load_tokenizer(tmp_path / "c")
    assert isinstance(saved, SFTTokenizer)
    assert saved.template.render(TALK, tools=[{}]).text == "one"


def test_messages_are_completed_as_in_transformers() -> None:
    source = (
        "{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}|{{ messages[0] | list }}"
    )
    message = {"role": "assistant", "content": "a", "reasoning": "hm", "tool_calls": None}
    rendered = ChatTemplate(source).render([message], return_assistant_spans=False)
    names = ["thinking", "role", "content", "reasoning", "reasoning_content"]
    assert rendered.text == f"hm|hm|{names}"
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    asked = ChatTemplate("{{ messages[0].content is defined }}")
    assert asked.render([call], return_assistant_spans=False).text == "False"


def test_the_template_for_tools_has_its_own_blocks_and_time() -> None:
    """The text of an assistant is found in the template that renders the conversation."""
    blocks = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    plain += "{% if add_generation_prompt %}<assistant>{% endif %}{{ strftime_now('') }}"
    talk = [{"role": "assistant", "content": "ab"}]
    for one, other in ((blocks, plain), (plain, blocks)):
        template = ChatTemplate(one, tool_source=other)
        spans = {blocks: ("ab", [(0, 2)]), plain: ("<assistant>ab", [(11, 13)])}
        assert template.render(talk) == spans[one]
        assert template.render(talk, tools=[{}]) == spans[other]
        assert template.uses_time
        assert template.has_generation_blocks() == (one is blocks)
        assert template.has_generation_blocks([]) == (other is blocks)
    assert not ChatTemplate(blocks, tool_source=blocks).uses_time


def test_templates_need_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DataError, match=r"need jinja2; pip install 'megatron-data\[chat\]'"):
        ChatTemplate("a")
