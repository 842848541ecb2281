"""Ends of turns, and answers of templates without `{% generation %}` blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES
from megatron_data import DataError, HuggingFaceTokenizer, IndexedDataset, tokenize_conversations
from megatron_data.cli import main
from megatron_data.sources.conversations import ConversationRow
from megatron_data.tokenizers import ChatTemplate, SFTTokenizer, TurnEnds
from megatron_data.tokenizers.conversations import encode_rows
from megatron_data.tokenizers.prompt_formats import PROMPT_FORMATS
from megatron_data.tokenizers.turns import find_turns

pytest.importorskip("jinja2")

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "\nIshmael."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "At sea."},
]
NAMES = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>"]


@pytest.fixture(scope="module")
def marked(tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    """A tokenizer with special tokens of several families."""
    extended = tokenizer.with_special_tokens(NAMES)
    return HuggingFaceTokenizer(extended.definition, {"bos": "<s>", "eos": "<|im_end|>"})


def said(name: str, talk: list[dict[str, Any]]) -> list[str]:
    family = FAMILIES[name]
    text, spans = ChatTemplate(
        family.template, {"eos_token": family.eos, "bos_token": family.bos}
    ).render(talk)
    return [text[first:last] for first, last in spans]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("qwen3", ["\nIshmael.<|im_end|>\n", "<think>\n\n</think>\n\nAt sea.<|im_end|>\n"]),
        ("phi3", ["\nIshmael.<|end|>\n", "At sea.<|end|>\n<|endoftext|>"]),
        ("r1", ["\nIshmael.<｜end▁of▁sentence｜>", "At sea.<｜end▁of▁sentence｜>"]),  # noqa: RUF001
        ("gemma", ["Ishmael.<end_of_turn>\n", "At sea.<end_of_turn>\n"]),
        ("glm4", ["\n\nIshmael.", "\nAt sea."]),
    ],
)
def test_answers_are_found_in_turns_that_change_when_others_follow(
    name: str, answers: list[str]
) -> None:
    assert said(name, TALK) == answers


def test_a_token_at_the_end_of_the_conversation_is_no_end_of_earlier_turns() -> None:
    source = FAMILIES["qwen3"].template + "{% if not add_generation_prompt %}<|end|>{% endif %}"
    text, spans = ChatTemplate(source).render(TALK)
    assert [text[first:last] for first, last in spans] == [
        "\nIshmael.<|im_end|>\n",
        "<think>\n\n</think>\n\nAt sea.<|im_end|>\n<|end|>",
    ]


EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    "source",
    [
        EACH.replace("m.content", "m.content if loop.last else m.content | length"),
        EACH.replace("m.content", "'' if loop.last else m.content"),
        EACH.replace("m.content", "m.content * 2") + "{{ messages | length }}",
        EACH + "{{ messages | map(attribute='content') | join | length }}",
        "{{ messages[-1].content[:1] }}" + EACH,
        EACH.replace("m.content", "m.content if m.content | length > 1 else raise_exception('no')")
        + "{{ messages | length }}",
        "{% for m in messages %}{{ 'B' if m.content | length == 1 }}{% endfor %}"
        + EACH
        + "{{ '' if add_generation_prompt else '<end>' }}",
    ],
    ids=["earlier", "last", "twice", "text behind", "text before", "refused", "heading"],
)
def test_an_answer_whose_place_is_not_certain_is_refused(source: str) -> None:
    """The text without later messages is another one, and another content changes more of it."""
    template = ChatTemplate(source + PROMPT)
    assert template.render(TALK, return_assistant_spans=False).text
    with pytest.raises(DataError, match=r"the chat template writes message 2 differently without"):
        template.render(TALK)


TOOLS_AT_THE_END = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% for m in messages %}{{ '<t>' if m == last else '' }}[{{ m.role }}]LEAD{{ m.content }};"
    "{% endfor %}" + PROMPT
)


def test_answers_are_found_if_only_the_last_question_has_the_tools() -> None:
    template = ChatTemplate(TOOLS_AT_THE_END.replace("LEAD", " "))
    text, spans = template.render(TALK)
    assert text == "[user] Who?;[assistant] \nIshmael.;<t>[user] Where?;[assistant] At sea.;"
    assert [text[first:last] for first, last in spans] == [" \nIshmael.;", " At sea.;"]
    lead = "{{ '<k>' if loop.last and m.role == 'assistant' else '' }}"
    with pytest.raises(DataError, match=r"the chat template writes message 2 differently without"):
        ChatTemplate(TOOLS_AT_THE_END.replace("LEAD", lead)).render(TALK)


@pytest.mark.parametrize("left", ["\ufdd0", "\ufdef", None])
def test_one_of_32_marks_must_be_unused(left: str | None) -> None:
    """The marks are U+FDD0 to U+FDEF, which Unicode reserves for programs."""
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) != left)
    talk = [{"role": "user", "content": marks}, *TALK[1:]]
    if left is not None:
        assert said("qwen3", talk)[0] == "\nIshmael.<|im_end|>\n"
        return
    with pytest.raises(DataError, match=r"the chat template writes message 2 differently without"):
        said("qwen3", talk)


def test_an_answer_without_content_has_no_place_for_a_mark() -> None:
    """The end of the conversation differs, so the texts of its beginnings do not help."""
    source = EACH.replace("m.content }}", "m.content or '' }}<|end|>")
    template = ChatTemplate(source + PROMPT.replace("{% endif", "{% else %}<eos>{% endif"))
    talk = [TALK[0], {"role": "assistant", "content": ""}, TALK[2]]
    text, spans = template.render(talk)
    assert [text[first:last] for first, last in spans] == ["<|end|>"]
    with pytest.raises(DataError, match=r"the chat template writes message 2 differently without"):
        template.render([TALK[0], {"role": "assistant", "content": None}, TALK[2]])


def test_answers_that_overlap_are_refused() -> None:
    """The prompt of the third answer begins within the second answer."""
    texts = {
        (0, True): "",
        (1, False): "a",
        (1, True): "a",
        (2, False): "abc",
        (2, True): "ab",
        (3, False): "abcd",
    }
    talk = [{"role": "assistant", "content": each} for each in "abd"]
    with pytest.raises(DataError, match=r"the chat template writes message 3 differently without"):
        find_turns(lambda turns, prompt: texts[len(turns), prompt], talk, "abcd")


def test_one_answer_may_follow_another_at_once() -> None:
    template = ChatTemplate(EACH.replace("[{{ m.role }}]", ""))
    found = template.render([TALK[1], TALK[3]])
    assert found.assistant_spans == [(0, 9), (9, 16)]
    assert template.render([]).assistant_spans == []


@pytest.mark.parametrize(
    ("source", "token"),
    [
        (FAMILIES["chatml"].template, "<|im_end|>"),
        (FAMILIES["glm4"].template, "<|user|>"),
        (FAMILIES["plain"].template, None),
        ("{% for m in messages %}<s>{{ m.content }}{% endfor %}", None),  # a beginning, no end
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
         "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "<|im_end|>"),
        ("{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}"
         "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "<|im_end|>"),
        ("{{ raise_exception('no') }}", None),
        # A template whose answers cannot be found.
        ("{{ raise_exception('no') if messages[0].role == 'assistant' else '' }}"
         + EACH.replace("[{{ m.role }}]", "").replace(
             "m.content }}", "m.content if loop.last else m.content | length }}<|im_end|>"),
         "<|im_end|>"),
        *((each.template, None) for each in PROMPT_FORMATS.values() if each.template),
    ],
)  # fmt: skip
def test_the_token_that_ends_a_turn(
    source: str, token: str | None, marked: HuggingFaceTokenizer
) -> None:
    assert TurnEnds(ChatTemplate(source), marked).token == token


@pytest.mark.parametrize(
    ("name", "end", "answers"),
    [
        ("chatml", "", ["\nIshmael.<|im_end|>\n", "At sea.<|im_end|>\n"]),
        ("glm4", "", ["\n\nIshmael.<|user|>", "\nAt sea."]),
        ("plain", "<|im_end|>", ["\nIshmael.\n", "At sea.\n<|im_end|>"]),
    ],
)
def test_a_conversation_ends_as_the_template_ends_it(
    name: str, end: str, answers: list[str], marked: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    template = ChatTemplate(FAMILIES[name].template)
    tokenize_conversations([tmp_path / "t.jsonl"], tmp_path / "t", marked, template)
    with (
        IndexedDataset(tmp_path / "t_conversation") as texts,
        IndexedDataset(tmp_path / "t_conversation_loss") as masks,
    ):
        ids, mask = texts.get(0).tolist(), masks.get(0).tolist()
    assert marked.decode(ids) == template.render(TALK).text + end
    answered = "".join(answers)
    assert marked.decode([n for n, counts in zip(ids, mask, strict=True) if counts]) == answered
    if not end:
        made = SFTTokenizer(marked, template).tokenize_conversation(TALK)
        assert (made.ids.tolist(), made.loss_mask.tolist()) == (ids, mask)


def test_the_end_of_a_document_is_not_repeated(marked: HuggingFaceTokenizer) -> None:
    """The loss counts an end that is appended if it follows an answer."""
    template = ChatTemplate.from_prompt_format("identity")
    question, answer = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}
    ended = {"role": "assistant", "content": "c d<|im_end|>"}
    empty = {"role": "user", "content": ""}
    talks: list[list[Any]] = [[question, answer], [question, ended], [question, answer, question]]
    talks += [[empty]]
    texts = ["a bc d<|im_end|>", "a bc d<|im_end|>", "a bc da b<|im_end|>", "<|im_end|>"]
    rows = [ConversationRow("here:1", [talk], None) for talk in talks]
    ends = TurnEnds(template, marked)
    for loss, counted in (("assistant", [1, 1, 0, 0]), ("all", [1, 1, 1, 1])):
        found = [one for (one,) in encode_rows(rows, marked, template, loss, ends)]  # type: ignore[arg-type]
        assert [marked.decode(one.ids.tolist()) for one in found] == texts
        assert [int(one.loss_mask[-1]) for one in found] == counted


@pytest.mark.parametrize("name", ["glm4", "chatml"])
def test_the_command_reports_a_last_answer_without_end(
    name: str,
    marked: HuggingFaceTokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    marked.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer/chat_template.jinja").write_text(FAMILIES[name].template)
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    words = ["--input", tmp_path / "t.jsonl", "--output-prefix", tmp_path / "t"]
    words += ["--tokenizer-model", tmp_path / "tokenizer"]
    assert main(["tokenize-conversations", *map(str, words)]) == 0
    reported = "ends an answer only by the next turn (<|user|>)" in capsys.readouterr().err
    assert reported == (name == "glm4")


@pytest.mark.parametrize("name", [name for name, each in PROMPT_FORMATS.items() if each.template])
def test_megatrons_formats_get_its_end_of_document(
    name: Any, marked: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """As in Megatron's SFTDataset, also in a format that ends its turns with a token."""
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    template = ChatTemplate.from_prompt_format(name)
    tokenizer = marked.with_special_tokens(["<SPECIAL_11>", "<SPECIAL_12>"])
    tokenize_conversations([tmp_path / "t.jsonl"], tmp_path / "t", tokenizer, template)
    with IndexedDataset(tmp_path / "t_conversation") as texts:
        assert tokenizer.decode(texts.get(0).tolist()) == (
            template.render(TALK).text + "<|im_end|>"
        )


IF_LAST = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|user|>' }}"


@pytest.mark.parametrize(
    ("source", "token", "stop", "is_open"),
    [
        (IF_LAST + "{% endfor %}", "<|user|>", "<|im_end|>", False),
        (FAMILIES["chatml"].template, "<|im_end|>", "<|im_end|>", False),
        (FAMILIES["glm4"].template, "<|user|>", "<|user|>", True),
        (FAMILIES["plain"].template, None, None, False),
        (PROMPT_FORMATS["identity"].template, None, None, False),
        ("{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}<|im_end|>", None, None,
         False),
    ],
)  # fmt: skip
def test_the_token_at_which_a_generated_answer_stops(
    source: str, token: str | None, stop: str | None, is_open: bool, marked: HuggingFaceTokenizer
) -> None:
    ends = TurnEnds(ChatTemplate(source), marked)
    assert (ends.token, ends.stop, ends.last_is_open) == (token, stop, is_open)


def test_an_answer_includes_the_longest_token_after_it(marked: HuggingFaceTokenizer) -> None:
    more = HuggingFaceTokenizer(
        marked.with_special_tokens(["<|user|>!", " "]).definition,
        {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    )
    ends = TurnEnds(ChatTemplate(FAMILIES["glm4"].template), more)
    text = "one\n <|user|>!two<|im_end|> three"
    # Space before a token is in the answer; a space is no end, though it is an added token.
    assert ends.closed(text, [(0, 3), (14, 27), (14, 17), (28, 33)]) == [
        (0, 14), (14, 27), (14, 27), (28, 33),
    ]  # fmt: skip
    assert ends.closed(text, [(0, 14)]) == [(0, 14)]
    # A beginning of text that also ends texts is an end.
    same = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    assert TurnEnds(ChatTemplate(same), more).token == "<|endoftext|>"
