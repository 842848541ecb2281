"""Tests of the limits of chat templates: time, memory and size."""

import json
import pickle
from pathlib import Path

import pytest
from megatron_data import DataError, HuggingFaceTokenizer, tokenize_conversations
from megatron_data.cli import main
from megatron_data.tokenizers import ChatTemplate, ImageTemplate, TemplateLimits

pytest.importorskip("jinja2", reason="chat templates are an extra of this package")

CHAT = [{"role": "user", "content": "Hello, world"}, {"role": "assistant", "content": "Hi"}]
LIMITS = TemplateLimits(steps=200_000, characters=1 << 20)
NESTED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(64) %}"
MORE = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"


def doubled(start: str, again: str) -> str:
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(64) %}}{again}{{% endfor %}}"


LONG = {
    "one range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loops that pass over": "{% for i in range(99999) if false %}{% endfor %}" * 9,
    "recursive macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a block without end": "{% block a %}{{ self.a() }}{% endblock %}",
    "a loop that calls itself": "{% for a in [[0]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "comparisons": "{% set x = range(9999)|list %}{% for i in x %}{{ 'a' in x }}{% endfor %}",
    "slices": "{% set x = range(9999)|list %}{% for i in x %}{% set y = x[1:] %}{% endfor %}",
    "long bodies": "{% for i in range(99999) %}" + "{% set x = 1 is odd %}" * 999 + "{% endfor %}",
    "equal lists in lists": NESTED + MORE + "{{ ns.x == ns.y }}",
    "lists in lists": NESTED + MORE + "{{ ns.x }}",
    "lists in lists as JSON": NESTED + MORE + "{{ ns.x | tojson }}",
    "filters": "{% for i in range(9999) %}{% set x = messages | tojson %}{% endfor %}",
}
LARGE = {
    "*": "{{ 'a' * 10**9 }}",
    "* of a list": "{{ [1] * 10**9 }}",
    "+": doubled("'a'", "{% set ns.x = ns.x + ns.x %}"),
    "+ of a list": doubled("[1]", "{% set ns.x = ns.x + ns.x %}"),
    "~": doubled("'a'", "{% set ns.x = ns.x ~ ns.x %}"),
    "a block that is set": doubled("'a'", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "**": "{{ 10 ** (10 ** 8) }}",
    "* of numbers": doubled("9", "{% set ns.x = ns.x * ns.x %}"),
    "literals in a loop": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a width": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format with a width": "{{ '{:{}}'.format(1, 10**9) }}",
    "% with a key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "% with a key in brackets": "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "% behind a %": "{{ '%l%%1000000000d' % 1 }}",
    "format behind a bracket": "{{ '{a[}]:1000000000}'.format(a={'}': 1}) }}",
    "format, other digits": "{{ '{:\u0661\u0660\u0660\u0660\u0660\u0660\u0660\u0660}'.format(1) }}",
    "format before a mistake": "{{ '{:1000000000}{'.format(1) }}",
    "a filter that formats": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ 'a\t'.expandtabs(10**9) }}",
    "translate": "{{ 'aa'.translate({97: 'a' * 9999}) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'a' * 9999) }}",
    "replace, a filter": "{{ ('a' * 9999) | replace('a', 'a' * 9999) }}",
    "join": "{{ ('a' * 9999).join(['b'] * 9999) }}",
    "join, a filter": "{{ range(9999) | map('string') | join('x' * 9999) }}",
    "indent": "{{ '\n\n' | indent(10**9, true) }}",
    "JSON": "{{ [1] | tojson(indent=10**9) }}",
    "JSON with separators": "{{ range(999) | list | tojson(separators=('a' * 9999, '')) }}",
    "bytes of a number": "{{ (5).to_bytes(10**9, 'big') }}",
    "sum": "{{ ([[1] * 99] * 9999) | sum(start=[]) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "random words": "{{ lipsum(10**6) }}",
    "center, a filter": "{{ 'a' | center(10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
}
NONE = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "half as many signs": "{{ " + "-" * 150 + "1 }}",
    "signs": "{{ " + "-" * 5000 + "1 }}",
    "sums": "{{ 1" + "+1" * 9999 + " }}",
    "blocks": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "digits": "{{ " + "9" * 5000 + " }}",
    "not Unicode": "{{ \ud800 }}",
    "size": "a" * 300_000,
}


@pytest.mark.parametrize("source", [*LONG.values(), *LARGE.values()], ids=[*LONG, *LARGE])
def test_templates_that_take_too_many_steps_or_characters_are_refused(source: str) -> None:
    with pytest.raises(DataError) as raised:
        ChatTemplate(source, limits=LIMITS).render(CHAT)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.parametrize("source", NONE.values(), ids=NONE)
def test_deeply_nested_templates_are_refused(source: str) -> None:
    with pytest.raises(DataError, match="not a chat template: ") as raised:
        ChatTemplate(source)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_templates_below_the_limits_are_rendered() -> None:
    def text(source: str) -> str:
        return ChatTemplate(source).render(CHAT[:1], [{"a": [1, "é"]}]).text

    assert text("{% for i in range(3) %}{{ loop.last }}{{ loop.length }}|{% endfor %}") == (
        "False3|False3|True3|"
    )
    assert text("{% for m in messages | map('items') %}{{ loop.length }}{% endfor %}") == "1"
    assert text("{{ 'a' * 3 + 'b' ~ 1 ~ [2] }}{{ 2 ** 10 - 7 % 4 // 1 }}") == "aaab1[2]1021"
    assert text("{{ messages[0].content[:5] | upper | replace('L', 'l') }}") == "HEllO"
    assert text("{{ tools | tojson }}{{ tools | tojson(indent=1) }}") == (
        '[{"a": [1, "é"]}]' + json.dumps([{"a": [1, "é"]}], indent=1, ensure_ascii=False)
    )
    assert text("{{ {'b': [1], 'a': 1} | tojson(separators=(',', ':'), sort_keys=true) }}") == (
        '{"a":1,"b":[1]}'
    )
    assert text("{{ {'b': 1, 'a': 1} | tojson(sort_keys=true) }}") == '{"a": 1, "b": 1}'
    assert text("{{ '{:>4}|%s'.format(7) % 'x' }}{{ 'ab'.join(['1', '2']) }}") == "   7|x1ab2"
    assert text("{{ ['b', 'a'] | sort | join(', ') }}{{ 'x\ny' | indent(2) }}") == "a, bx\n  y"
    assert text("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}") == "1"
    assert text("{{ 'role' in messages[0] and 'Hello' in messages[0].content }}") == "True"
    assert text("{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}{{ [1, 2] | sum }}") == "13"
    assert text("{{ none is none }}{{ undefined_thing is defined }}{{ 3.14 | round(1) }}") == (
        "TrueFalse3.1"
    )


def test_numbers_and_brackets_outside_specifications_are_text() -> None:
    def text(source: str) -> str:
        return ChatTemplate(source, limits=LIMITS).render(CHAT[:1]).text

    assert text("""{{ '{{"name": "{}"}}'.format('x') }}""") == '{"name": "x"}'
    assert text("{{ 'limit 1000000: {:3}'.format(1) }}") == "limit 1000000:   1"
    assert text("{{ 'limit 1000000: %(100000 a)3d%%1000000' % {'100000 a': 1} }}") == (
        "limit 1000000:   1%1000000"
    )


def test_only_methods_that_lengthen_a_text_count_more_than_it() -> None:
    assert TemplateLimits().characters == 1 << 26  # twice the longest document
    text = [{"role": "user", "content": "x" * 600}]
    limits = TemplateLimits(characters=1000)
    for method in ("split('y')[-1]", "strip()", "lstrip()", "startswith('y')", "replace('y', 'z')"):
        ChatTemplate(f"{{{{ messages[0].content.{method} }}}}", limits=limits).render(text)
    for method in ("upper", "lower", "title", "swapcase", "casefold", "capitalize"):
        with pytest.raises(DataError, match="more than 1,000 characters"):
            ChatTemplate(f"{{{{ messages[0].content.{method}() }}}}", limits=limits).render(text)


def test_a_conversation_has_one_budget() -> None:
    """A template rendered turn by turn shares one budget for all turns."""
    talk = [CHAT[0], CHAT[1]] * 40
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    once = ChatTemplate("{% generation %}{% endgeneration %}" + source, limits=LIMITS)
    assert len(once.render(talk).text) == 40 * 14
    tight = TemplateLimits(steps=5000)
    assert once.with_limits(tight).render(talk)
    with pytest.raises(DataError, match="exceeds the limit of steps"):
        ChatTemplate(source, limits=tight).render(talk)
    assert ChatTemplate(source).render(talk).text == once.render(talk).text


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{{ '[assistant]' if add_generation_prompt else '<end>' }}",
        "{% for m in messages %}{% set b %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endset %}{{ b | trim }}{% endfor %}",
    ],
    ids=["turns", "blocks"],
)
def test_a_limit_is_named_wherever_it_is_exceeded(source: str) -> None:
    """Also in a rendering that only finds the answers, whose other errors are not reported."""
    template = ChatTemplate(source)
    talk = [CHAT[0], {"role": "assistant", "content": "\nHi\n"}]
    talk *= 1 if "generation %" in source else 2
    refused = 0
    for steps in range(1, 2000, 17):
        try:
            assert template.with_limits(TemplateLimits(steps)).render(talk).assistant_spans
            break
        except DataError as error:
            assert "exceeds the limit of steps" in str(error), steps
            refused += 1
    assert 4 < refused < 115


def test_limits_are_kept_with_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content * 9 }}").with_limits(LIMITS)
    for each in (template, ImageTemplate(template)):
        assert each.limits == pickle.loads(pickle.dumps(each)).limits == LIMITS
        assert each.with_limits(TemplateLimits(9, 9)).limits == TemplateLimits(9, 9)
        assert each.limits == LIMITS
        with pytest.raises(DataError, match="more than 50 characters"):
            each.with_limits(TemplateLimits(999, 50)).render(CHAT[:1])
    with pytest.raises(DataError, match="a template of 0 steps"):
        TemplateLimits(0)


def test_a_conversation_above_the_limits_is_skipped(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "a.jsonl"
    long = [CHAT[0], {"role": "assistant", "content": "x" * 1000}]
    rows = [{"messages": CHAT}, {"messages": long}, {"messages": CHAT}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, limits=TemplateLimits(characters=500))
    report = tokenize_conversations([lines], tmp_path / "o", tokenizer, template, on_error="skip")
    assert (report.conversations, report.dataset.skipped.kinds) == (2, {"template": 1})
    folder = tmp_path / "tokenizer"
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(source)
    words = ["tokenize-conversations", "--input", str(lines), "--tokenizer-model", str(folder)]
    words += ["--output-prefix", str(tmp_path / "c"), "--max-template-characters", "500"]
    assert main(words) == 1
    assert "a.jsonl:2: " in (printed := capsys.readouterr().err)
    assert "more than 500 characters (--max-template-characters" in printed
    assert main([*words, "--max-template-characters", "5000"]) == 0
    words += ["--overwrite", "--max-template-steps", "5"]
    assert main([*words, "--max-template-characters", "5000"]) == 1
    assert "exceeds the limit of steps (--max-template-steps" in capsys.readouterr().err
