"""The text of `{% generation %}` blocks that a template captures, trims or tests."""

import pytest
from megatron_data import DataError
from megatron_data.tokenizers import ChatTemplate
from megatron_data.tokenizers.generation_blocks import Blocks, render_blocks

pytest.importorskip("jinja2")

MANY = "".join(map(chr, range(0xFDD0, 0xFDEE)))  # two marks are left
MIDDLE = "".join(map(chr, range(0xFDD1, 0xFDEF)))  # the first and the last mark are left
SET = "{% set body %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"


def rendered(body: str, *answers: str) -> tuple[str, list[str]]:
    """Returns the text of a template for answers, and the texts of the assistant."""
    source = "{% for m in messages %}" + body + "{% endfor %}"
    messages = [{"role": "assistant", "content": answer} for answer in answers]
    text, spans = ChatTemplate(source).render(messages)
    assert all(0 <= first < last <= len(text) for first, last in spans)
    return text, [text[first:last] for first, last in spans]


@pytest.mark.parametrize(
    ("body", "answer", "text", "said"),
    [
        ("<" + SET + "{{ body }}>", "\nyes\n", "<\nyes\n>", ["\nyes\n"]),
        ("<" + SET + "{{ body | trim }}>", "\nyes\n", "<yes>", ["yes"]),
        ("<" + SET + "{{ body.lstrip() }}>", "\nyes\n", "<yes\n>", ["yes\n"]),
        ("<" + SET + "{{ body.rstrip() }}>", "\nyes\n", "<\nyes>", ["\nyes"]),
        ("<" + SET + "{% if body %}+{% else %}-{% endif %}>", "", "<->", []),
        ("<" + SET + "{% if body %}{{ body }}{% else %}-{% endif %}>", "", "<->", []),
        ("<" + SET + "{% if body.strip() %}{{ body }}{% endif %}>", " \n", "<>", []),
        ("<" + SET + "{{ body }}|{{ body }}>", "yes", "<yes|yes>", ["yes", "yes"]),
        (SET + "-", "yes", "-", []),
        ("{% filter trim %} {% generation %} {{ m.content }} {% endgeneration %} {% endfilter %}.",
         "yes", "yes.", ["yes"]),
        ("{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
         "<{{ f(m) | trim }}>", "\nyes", "<yes>", ["yes"]),
        ("{% generation %}a{% generation %}{{ m.content }}{% endgeneration %}b"
         "{% endgeneration %}c", "yes", "ayesbc", ["ayesb"]),
        ("{% generation %}a{% generation %}{{ m.content }}{% endgeneration %}{% endgeneration %}c",
         "yes", "ayesc", ["ayes"]),
        ("{% generation %}{% generation %}{{ m.content }}{% endgeneration %}b{% endgeneration %}c",
         "yes", "yesbc", ["yesb"]),
        ("<" + SET + "{{ body }}>", MANY, f"<{MANY}>", [MANY]),
        ("<" + SET + "{{ body }}>", MIDDLE, f"<{MIDDLE}>", [MIDDLE]),
        ("{% generation %}{{ m.content }}{% endgeneration %}!", "\ufdd0", "\ufdd0!", ["\ufdd0"]),
        ("{{ m.content }}{% generation %}{{ m.content }}{% endgeneration %}!", "\ufdd1",
         "\ufdd1\ufdd1!", ["\ufdd1"]),
    ],
)  # fmt: skip
def test_text_and_answers_by_hand(body: str, answer: str, text: str, said: list[str]) -> None:
    assert rendered(body, answer) == (text, said)


def test_blocks_in_blocks_are_part_of_each_answer() -> None:
    inner = "{% generation %}{{ m.content }}{% endgeneration %}"
    body = "{% generation %}a" + inner + "b{% endgeneration %}c"
    assert rendered(body, "yes", "no") == ("ayesbcanobc", ["ayesb", "anob"])


@pytest.mark.parametrize(("start", "renderings"), [("", 1), ("\ufdd0", 3), ("\ufdd1", 3)])
def test_a_template_that_writes_its_blocks_directly_is_rendered_once(
    start: str, renderings: int
) -> None:
    """Unless a message has a mark: then once without marks, and once with marks that are unused."""
    calls: list[Blocks] = []

    def render(blocks: Blocks) -> str:
        calls.append(blocks)
        return f"{start}<{blocks.write('yes')}>{blocks.write('')}{blocks.write('no')}"

    first = len(start) + 1
    expected = [(first, first + 3), (first + 4, first + 6)]
    assert render_blocks(render, True) == (f"{start}<yes>no", expected)
    assert len(calls) == renderings


def test_a_text_without_answers_may_come_from_any_template() -> None:
    source = "{% for m in messages %}" + SET + "{{ body | length }}{{ body }}{% endfor %}"
    talk = [{"role": "assistant", "content": "yes"}]
    assert ChatTemplate(source).render(talk, return_assistant_spans=False) == ("3yes", [])


def test_each_block_has_its_own_white_space() -> None:
    body = SET + "{{ body.strip() if loop.first else body }}|"
    assert rendered(body, "\na\n", "\nb\n") == ("a|\nb\n|", ["a", "\nb\n"])


@pytest.mark.parametrize(
    "body",
    [
        SET + "{{ body | length }}{{ body }}",
        SET + "{{ body[0] }}",
        SET + "{{ body | upper }}",
        SET + "{% if body == 'yes' %}yes{% endif %}",
        SET + "{{ body.split('e')[0] }}-{{ body.split('e')[-1] }}",
        SET + "{{ body[::-1] }}",
        SET + "{% if '\ufdd0' in body %}{{ raise_exception('a mark') }}{% endif %}{{ body[1:] }}",
    ],
)
def test_an_answer_that_cannot_be_found_is_refused(body: str) -> None:
    with pytest.raises(DataError, match=r"the text of its {% generation %} block 1, so") as raised:
        rendered(body, "yes")
    assert "\n" not in str(raised.value)


def test_a_variable_that_is_set_in_a_block_stays_there() -> None:
    """As in transformers, the body of a block has a scope of its own."""
    body = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert rendered(body, "") == ("21", ["2"])
    with pytest.raises(DataError, match=r"not a chat template: .*loop"):
        ChatTemplate("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}"
                     "{% endfor %}")  # fmt: skip
