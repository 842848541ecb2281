"""Filters of chat templates with every form of their arguments: as in Jinja, up to their limits."""

import re

import pytest
from megatron_data import DataError
from megatron_data.tokenizers import ChatTemplate, TemplateLimits

jinja2 = pytest.importorskip("jinja2", reason="chat templates are an extra of this package")

CHAT = [{"role": "user", "content": "Hello, world"}, {"role": "assistant", "content": "Hi"}]
ROWS = "{% set rows = [{'a': 1, 'b': [1]}, {'a': 2, 'b': [2]}] %}"
SMALL = TemplateLimits(steps=20_000, characters=2000)


def rendered(source):
    return ChatTemplate(source, limits=SMALL).render(CHAT, return_assistant_spans=False).text


@pytest.mark.parametrize(
    "call",
    [
        *("1.256 | round", "1.256 | round(2)", "1.256 | round(precision=2)"),
        *("1.256 | round(0, 'ceil')", "1.5 | round(100)", "1.5 | round(none)", "155 | round(-100)"),
        *("[1, 2] | sum", "rows | sum('a')", "rows | sum('a', 5)", "rows | sum(attribute='a')"),
        *("rows | sum(start=1, attribute='a')", "[0.5] | sum(start=0.25)"),
        *("'a\\nb' | indent", "'a\\nb' | indent(2)", "'a\\nb' | indent(width=2, first=true)"),
        *("'a\\nb' | indent('-> ')", "'a\\nb' | indent(0)"),
        *("[1, 2] | join", "[1, 2] | join(', ')", "[1, 2] | join(d='-')"),
        *("rows | join('-', 'a')", "rows | join('-', attribute='a')"),
        *("'%s=%d' | format('x', 3)", "'%(a)s' | format(a=3)"),
        *("'aXbX' | replace('X', '--')", "'aXbX' | replace('X', '--', 1)"),
        *("[3, 1] | sort", "[3, 1, 3] | unique | list", "rows | groupby('a') | length"),
        *("[3, 1] | min", "rows | map(attribute='a') | max", "[] | first | default('none')"),
        *("range(3) | string", "121 | replace(1, 3)"),
        *("'aXb' | replace(old='X', new='--')", "'aXb' | replace('X', new='--', count=0)"),
        *("'abc' | length", "'abc' | reverse", "{'a': 1} | items | list", "5 is ge 5"),
    ],
)
def test_filters_return_what_they_return_in_jinja(call):
    plain = jinja2.Environment().from_string(f"{ROWS}{{{{ {call} }}}}").render()
    assert rendered(f"{ROWS}{{{{ {call} }}}}") == plain


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("1.5 | round(101)", "a precision of 101 digits is not supported"),
        ("1.5 | round(-101)", "a precision of -101 digits"),
        ("1.5 | round(precision=101)", "a precision of 101 digits"),
        ("rows | sum('b', [])", "only numbers are summed"),
        ("[[1], [2]] | sum(start=[])", "only numbers are summed"),
        ("rows | sum('a', none)", "NoneType"),
        ("{} | tojson(indent=101)", "tojson(indent=101); give at most 100"),
        ("{} | tojson(indent=-1)", "tojson(indent=-1); give at most 100"),
        *(
            (call, "characters")
            for call in (
                "'a\\nb' | indent(1990)",
                "'a\\nb' | indent(width=1990)",
                "'a\\nb' | indent(first=true, width=1990)",
                "'a' | indent('x' * 1500)",
                "range(99) | join('x' * 30)",
                "range(99) | join(d='x' * 30)",
                "'%2001d' | format(1)",
                "('x' * 200) | replace('x', 'y' * 20)",
            )
        ),
    ],
)
def test_arguments_above_the_limits_are_refused_in_every_form(call, message):
    with pytest.raises(DataError, match=re.escape(message)):
        rendered(f"{ROWS}{{{{ {call} }}}}")


@pytest.mark.parametrize("indent", [0, 1, 100])
def test_json_may_be_indented(indent):
    assert rendered(f"{{{{ [1] | tojson(indent={indent}) }}}}") == f"[\n{' ' * indent}1\n]"


@pytest.mark.parametrize(
    "name", ["batch", "center", "pprint", "random", "slice", "striptags", "urlize", "wordwrap"]
)
def test_filters_without_use_or_bound_are_missing(name):
    with pytest.raises(DataError, match=name):
        rendered(f"{{{{ 'a' | {name} }}}}")


def test_the_characters_of_a_text_count_together():
    limits = TemplateLimits(steps=1_000_000, characters=2000)
    for count, fits in ((500, True), (501, False)):
        template = ChatTemplate(f"{{% for i in range({count}) %}}four{{% endfor %}}", limits=limits)
        if fits:
            assert template.render([], return_assistant_spans=False).text == "four" * count
            continue
        with pytest.raises(DataError, match="characters"):
            template.render([], return_assistant_spans=False)
