"""What the operations of a chat template cost, by hand: every machine refuses the same templates.

A call costs 32 steps, a filter 8, an operator 1, and reading or making 64 characters 1.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from megatron_data import DataError
from megatron_data.tokenizers import ChatTemplate, TemplateLimits

pytest.importorskip("jinja2", reason="chat templates are an extra of this package")

from megatron_data.tokenizers.sandbox import LONGEST_SOURCE, SandboxedTemplate
from megatron_data.tokenizers.template_limits import (
    CALL,
    FILTER,
    Budget,
    TemplateLimitError,
    check_binary,
    check_format,
    check_method,
    check_percent,
)

PLENTY = 10**6


def cost(work: Callable[[Budget], object], characters: int = PLENTY) -> int:
    """Returns the steps that some work costs."""
    budget = Budget(PLENTY, characters)
    work(budget)
    return PLENTY - budget.steps


def longest(work: Callable[[Budget], object]) -> int:
    """Returns the smallest limit of characters that allows some work."""
    low, high = 0, PLENTY
    while low < high:
        middle = (low + high) // 2
        try:
            work(Budget(PLENTY, middle))
        except TemplateLimitError:
            low = middle + 1
        else:
            high = middle
    return low


def text_of(source: str, *, steps: int = PLENTY, characters: int = PLENTY) -> str:
    template = ChatTemplate(source, limits=TemplateLimits(steps, characters))
    return template.render([{"role": "user", "content": "a"}], return_assistant_spans=False).text


def test_the_documented_costs_of_calls_and_filters() -> None:
    assert (CALL, FILTER) == (32, 8)
    limits = TemplateLimits()
    assert (limits.steps, limits.characters) == (20_000_000, 67_108_864)
    assert TemplateLimits(1, 1).steps == 1
    for wrong in ((0, 1), (1, 0), (-1, 5)):
        with pytest.raises(DataError, match="give at least 1 of each"):
            TemplateLimits(*wrong)


def test_the_last_step_may_be_spent_and_no_further_one() -> None:
    budget = Budget(7, 9)
    budget.spend(7)
    assert budget.steps == 0
    with pytest.raises(TemplateLimitError, match="exceeds the limit of steps"):
        budget.spend(1)


@pytest.mark.parametrize(
    ("characters", "steps"), [(-5, 1), (0, 1), (1, 1), (63, 1), (64, 2), (127, 2), (128, 3)]
)
def test_64_characters_that_are_made_cost_one_step(characters: int, steps: int) -> None:
    assert cost(lambda budget: budget.allocate(characters)) == steps


def test_a_text_may_have_as_many_characters_as_are_allowed() -> None:
    assert longest(lambda budget: budget.allocate(640)) == 640
    with pytest.raises(TemplateLimitError, match="a text of more than 1,639 characters"):
        Budget(PLENTY, 1639).allocate(1640)


@pytest.mark.parametrize(
    ("value", "size", "steps"),
    [
        ("x" * 640, 640, 1 + 10),
        (b"x" * 640, 640, 1 + 10),
        (5, 8, 1),
        (None, 8, 1),
        ([], 8, 1),
        ([1, 2, 3], 4 * 8, 1 + 3 * 2),
        ((1, 2, 3), 4 * 8, 1 + 3 * 2),
        ({1, 2, 3}, 4 * 8, 1 + 3 * 2),
        (["x" * 100], 100 + 2 * 8, 1 + 2 + 1),
        ([["ab"], ["c"]], 3 + 5 * 8, 1 + 2 * 2 + 2 * 2),
        ({"a": 1}, 1 + 3 * 8, 1 + 2 + 2),
        ({"a": 1, "b": [2]}, 2 + 6 * 8, 1 + 2 * 2 + 4 + 2),
        (range(100), 8 + 800, 1 + 12),
    ],
)
def test_reading_a_value_costs_its_elements_and_its_text(value: Any, size: int, steps: int) -> None:
    """A value counts 8 characters and its text; each element of a container costs two steps."""
    assert Budget(PLENTY, PLENTY).measure(value) == size
    assert cost(lambda budget: budget.measure(value)) == steps
    assert longest(lambda budget: budget.measure(value)) == size
    assert cost(lambda budget: budget.measure(value), size) == steps


def test_elements_cost_their_weight() -> None:
    assert cost(lambda budget: budget.spend_elements([1, 2, 3])) == 4
    assert cost(lambda budget: budget.spend_elements([1, 2, 3], 5)) == 20
    assert cost(lambda budget: budget.spend_elements(iter([1, 2, 3]), 5)) == 10  # no length
    assert cost(lambda budget: budget.collect(iter("abc"))) == 3
    assert Budget(9, 9).collect(iter("abc")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("left", "operator", "right", "steps"),
    [
        ("x" * 64, "+", "x" * 64, 1 + 3),
        (b"x" * 64, "+", b"x" * 64, 1 + 3),
        ([1, 2, 3], "+", (4,), 1 + 2 * 4),
        (1, "+", 2, 1),
        ("a", "+", [1], 1),  # an error of the template
        ("ab", "*", 64, 1 + 3),
        (64, "*", "ab", 1 + 3),
        ("ab", "*", -3, 1 + 1),
        ([1, 2], "*", 5, 1 + 2 * 10),
        (5, "*", (1, 2), 1 + 2 * 10),
        ([1, 2], "*", -5, 1),
        (3, "*", 4, 1),
        (2.5, "*", 4, 1),
        (7, "-", 4, 1),
        (7, "%", 4, 1),
        (2, "**", 9, 1),
        ("%d", "%", 5, 1 + 1 + 1),
        (2**9999, "-", 9, 1),
        (2.5, "**", 3, 1),
        (1, "+", "a", 1),  # an error of the template
    ],
)
def test_operators_cost_what_they_make(left: Any, operator: str, right: Any, steps: int) -> None:
    assert cost(lambda budget: check_binary(budget, operator, left, right)) == steps


@pytest.mark.parametrize(
    ("left", "operator", "right"),
    [
        (2**9999, "*", 2**9999),  # 10,000 bits each
        (2, "**", 10_000),  # 2 bits
        (1, "**", 20_000),
        (0, "**", 20_000),
        (-2, "**", 10_000),
        (2, "**", -10_000),
    ],
)
def test_integers_have_at_most_20_000_bits(left: int, operator: str, right: int) -> None:
    check_binary(Budget(PLENTY, PLENTY), operator, left, right)
    more = right * 2 if operator == "*" else right + (1 if right > 0 else -1)
    with pytest.raises(TemplateLimitError, match="an integer of more than 20,000 bits"):
        check_binary(Budget(PLENTY, PLENTY), operator, left, more)


@pytest.mark.parametrize(
    ("text", "values", "size"),
    [
        ("%d", [5], 2 + 8),
        ("%1000d", [5], 6 + 1000 + 8),
        ("%9d%7d", [1, 2], 6 + 2 * (9 + 16)),
        ("%7.9f", [1], 5 + 9 + 8),
        ("%(key)40s", ["x" * 100], 9 + 40 + 100),
        ("no specification", [5], 16),
    ],
)
def test_percent_is_bounded_by_its_widths_and_values(
    text: str, values: list[Any], size: int
) -> None:
    assert longest(lambda budget: check_percent(budget, text, values)) == max(
        size, *(each if isinstance(each, int) else len(each) for each in values)
    )


@pytest.mark.parametrize(
    ("text", "values", "size"),
    [
        ("{}", [5], 2 + 8),
        ("{:1000}", [5], 7 + 1000 + 8),
        ("{:9}{:7}", [1, 2], 8 + 2 * (9 + 16)),
        ("{a:>7.9}", [1], 8 + 9 + 8),
        ("{{1000}}", [5], 8),
    ],
)
def test_format_is_bounded_by_its_widths_and_values(
    text: str, values: list[Any], size: int
) -> None:
    assert longest(lambda budget: check_format(budget, text, values)) == size


@pytest.mark.parametrize("check", [check_percent, check_format])
def test_widths_have_at_most_5_digits_and_none_comes_from_a_value(
    check: Callable[..., None],
) -> None:
    start, end = ("%", "d") if check is check_percent else ("{:", "}")
    check(Budget(PLENTY, PLENTY), f"{start}99999{end}", [1])
    with pytest.raises(TemplateLimitError, match="a number of more than 5 digits"):
        check(Budget(PLENTY, PLENTY), f"{start}100000{end}", [1])
    for text in ("%*d", "%.*f", "%-5.*f") if check is check_percent else ("{:{}}", "{:>{w}}"):
        with pytest.raises(TemplateLimitError, match="a width given by a value"):
            check(Budget(PLENTY, PLENTY), text, [1, 2])


@pytest.mark.parametrize(
    ("value", "name", "arguments", "size"),
    [
        ("x" * 640, "strip", (), 640),
        ("x" * 640, "upper", (), 4 * 640),
        ("x" * 640, "encode", (), 4 * 640),
        ("x" * 640, "center", (100,), 640),
        ("x" * 640, "ljust", (900,), 900),
        ("x" * 640, "zfill", (900,), 900),
        ("x" * 640, "rjust", (900, "-"), 900),
        ("abab", "replace", ("a", "12345"), 4 + 2 * 4),
        ("abab", "replace", ("ab", ""), 4),
        ("abab", "replace", ("ab", "c", 1), 4),
        ("abab", "replace", (b"a", "12"), 4),  # an error of the template
        ("--", "join", (["x" * 50, "y"],), 51 + 3 * 8 + 2 * 2),
    ],
)
def test_methods_of_texts_are_bounded_by_their_results(
    value: str, name: str, arguments: tuple[Any, ...], size: int
) -> None:
    assert longest(lambda budget: check_method(budget, value, name, arguments)) == size


@pytest.mark.parametrize(
    ("value", "name", "arguments", "steps"),
    [
        ([1, 2, 3], "copy", (), 4),
        ({"a": 1}, "items", (), 2),
        ({"a": 1}, "get", ("a",), 0),
        ([1, 2, 3], "index", (2,), 7),
        ([1, 2, 3], "count", (2,), 7),
        ({"a": 1}.keys(), "isdisjoint", ([1, 2, 3],), 2 + 7 + 4),
    ],
)
def test_methods_of_containers_cost_their_elements(
    value: Any, name: str, arguments: tuple[Any, ...], steps: int
) -> None:
    assert cost(lambda budget: check_method(budget, value, name, arguments)) == steps


@pytest.mark.parametrize(
    ("source", "characters"),
    [
        ("{{ 'a\nb' | indent(665) }}", 3 + 3 * 665),
        ("{{ ('a\n' * 330) | indent }}", 660 + 332 * 4),
        ("{{ 'a\nb' | indent('-' * 665) }}", 3 + 3 * 665),
        ("{{ ('ab\n' * 330) | indent(0) }}", 990),
        ("{{ ('ab\n' * 330) | indent(-3) }}", 990),
        ("{{ ['x', 'y'] | join('-' * 900) }}", 2 + 3 * 8 + 2 * 900),
        ("{{ ('x' * 200) | replace('x', 'y' * 9) }}", 1800),
        ("{{ strftime_now('%Y') }}", 2 * 256),
        ("{{ [1] | tojson(indent=100) }}", 105),
    ],
)
def test_filters_are_refused_from_one_character_too_many(source: str, characters: int) -> None:
    text_of(source, characters=characters)
    with pytest.raises(DataError, match="a text of more than"):
        text_of(source, characters=characters - 1)


def test_the_time_of_a_template_is_that_of_the_call_unless_it_is_given() -> None:
    source = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    day = datetime(2001, 2, 3, 4, 5)
    assert ChatTemplate(source, now=day).render([], return_assistant_spans=False).text == (
        "2001-02-03 04:05"
    )
    before = datetime.now()
    found = ChatTemplate(source).render([], return_assistant_spans=False).text
    assert f"{before:%Y-%m-%d %H:%M}" <= found <= f"{datetime.now():%Y-%m-%d %H:%M}"


def test_a_template_has_at_most_262_144_characters() -> None:
    assert LONGEST_SOURCE == 262_144
    assert text_of("x" * 262_144) == "x" * 262_144
    with pytest.raises(DataError, match="not a chat template: it has more than 262,144 char"):
        ChatTemplate("x" * 262_145)


@pytest.mark.parametrize("kind", ["text", "image", "image_url", "video", "audio"])
def test_a_list_of_parts_is_not_written_as_python_spells_it(kind: str) -> None:
    for value in ([{"type": kind}], ["a", {"type": kind}]):
        with pytest.raises(DataError, match="writes a content of several parts"):
            text_of(f"{{{{ {value} }}}}")
    assert text_of("{{ ['a', {'type': 'b'}] }}") == "['a', {'type': 'b'}]"
    assert text_of("{{ {'type': 'text'} }}") == "{'type': 'text'}"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("'%(a)s-%%-%5.1f|%-4d|%+d|%x' % (1.25, 7, 8, 255)", None),
        ("'%s and %r' % ('a', 'b')", "a and 'b'"),
        ("'%5.1f|%-4d|%+d|%x' % (1.25, 7, 8, 255)", "  1.2|7   |+8|ff"),
        ("'{:>5}|{:^5}|{:,}'.format('a', 'b', 12345)", "    a|  b  |12,345"),
        ("[1, 2, 3][1:] + [4] * 2", "[2, 3, 4, 4]"),
        ("1 if 'a' in ['b', 'a'] and 'x' not in 'abc' else 2", "1"),
        ("[[1, 2], [3]] | map('length') | join('+')", "2+1"),
    ],
)
def test_values_are_those_of_python(call: str, expected: str | None) -> None:
    if expected is None:  # a mapping is needed
        with pytest.raises(DataError, match="cannot render the messages"):
            text_of(f"{{{{ {call} }}}}")
    else:
        assert text_of(f"{{{{ {call} }}}}") == expected


@pytest.mark.parametrize("levels", [1, 5])
def test_recursive_loops_macros_and_blocks_work_within_their_limits(levels: int) -> None:
    tree = "[]"
    for _ in range(levels):
        tree = f"[{tree}, {tree}]"
    source = f"{{% for a in {tree} recursive %}}x{{{{ loop(a) }}}}{{% endfor %}}"
    leaves = 2 ** (levels + 1) - 2
    assert text_of(source) == "x" * leaves
    with pytest.raises(DataError, match=re.escape("--max-template-steps")):
        text_of(source, steps=leaves)


@pytest.mark.parametrize(
    "source",
    [
        lambda depth: "{{ " + "-" * (depth - 3) + "1 }}",  # in a template, an output: a number
        lambda depth: "{% if a %}" * (depth - 3) + "x" + "{% endif %}" * (depth - 3),
    ],
    ids=["signs", "conditions"],
)
def test_a_template_has_at_most_100_levels(source: Callable[[int], str]) -> None:
    try:
        ChatTemplate(source(100))
    except DataError as error:  # of Python's compiler, which allows fewer blocks in blocks
        assert "nested more than 100 levels" not in str(error)
    with pytest.raises(DataError, match="it is nested more than 100 levels deep"):
        ChatTemplate(source(101))


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        ("", 1),
        ("x" * 64, 2),
        ("{{ a }}", 11 + 11),  # read as a value, and written
        ("{{ n }}", 1 + 1),
        ("{% set x = range(3) %}", 32 + 1),
        ("{% set x = a.split() %}", 32 + 11 + 1),
        ("{% set x = a.upper() %}", 32 + 41 + 10 + 1),  # up to 4 characters for each
        ("{% set x = l.copy() %}", 32 + 4 + 1),
        ("{% set x = '-'.join(l) %}", 32 + 3 + (7 + (1 + 3) // 64) + 1 + 1),
        ("{% set x = l | length %}", 8 + 4 + 1),
        ("{% set x = a | upper %}", 8 + 11 + 11 + 1),
        ("{% set x = l | sort %}", 8 + 7 + 4 + 1),
        ("{% set x = l | tojson %}", 8 + 7 + 7 + 1 + 1),
        ("{% for i in l %}{% endfor %}", 4 + 1),
        ("{% for i in l %}" + "y" * 64 + "{% endfor %}", 2 * 4 + 4),
        ("{% for i in l %}" + "{% set x = n %}" * 10 + "{% endfor %}", 2 * 4 + 1),  # 32 nodes
        ("{% for i in l %}" + "{% set x = n %}" * 9 + "{% endfor %}", 1 * 4 + 1),
        ("{% for i in l | map('length') %}{% endfor %}", 8 + 4 + 2 + 3 * (1 + 8 + 2) + 1),
        ("{% set x = a == a %}", 11 + 11 + 1),
        ("{% set x = n == none %}", 1),
        ("{% set x = l == l %}", 7 + 7 + 1),
        ("{% set x = a in m %}", 11 + 1),  # a key is found without reading the others
        ("{% set x = a in l %}", 11 + 7 + 1),
        ("{% set x = m == m %}", 5 + 5 + 1),
        ("{% set x = a[1:] %}", 641 + 1),
        ("{% set x = a ~ n %}", 11 + 1 + (1 + 648 // 64) + 1),
        ("{% set x = n + n %}", 1 + 1),
        ("{% macro f() %}{% endmacro %}{% set x = f() %}", 32 + 1 + 1 + 1),
        ("{% macro f() %}{{ a }}{% endmacro %}{% set x = f() %}", 32 + 1 + 11 + 11 + 10 + 1),
    ],
)
def test_the_steps_of_a_template_by_hand(source: str, steps: int) -> None:
    """Lists have 3 elements of one letter, and `a` has 640 letters; the end costs one step."""
    budget = Budget(PLENTY, PLENTY)
    values = {"a": "x" * 640, "l": ["p", "q", "r"], "m": {"k": 1}, "n": 5}
    SandboxedTemplate(source, Budget(PLENTY, PLENTY)).render(budget, values)
    assert PLENTY - budget.steps == steps


def test_methods_read_generators_once() -> None:
    assert text_of("{{ '-'.join(['a', 'b'] | map('upper')) }}") == "A-B"
