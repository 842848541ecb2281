"""Steps of nested expressions, bodies and filters of chat templates, by hand."""

import pytest
from megatron_data import DataError
from megatron_data.tokenizers import ChatTemplate

pytest.importorskip("jinja2", reason="chat templates are an extra of this package")

import jinja2
from megatron_data.tokenizers.sandbox import SandboxedTemplate
from megatron_data.tokenizers.template_filters import limited_filters, to_json
from megatron_data.tokenizers.template_limits import Budget, TemplateLimitError

PLENTY = 10**6
VALUES = {"a": "x" * 640, "l": ["p", "q", "r"], "n": 5}
SETS = "{% set x = n %}" * 9
BLOCK = "{% generation %}a{% endgeneration %}"


def spent(source: str, characters: int = PLENTY) -> int:
    """Returns the steps of rendering a template."""
    budget = Budget(PLENTY, characters)
    SandboxedTemplate(source, Budget(PLENTY, PLENTY)).render(budget, VALUES)
    return PLENTY - budget.steps


def text_of(source: str) -> str:
    return ChatTemplate(source).render([], return_assistant_spans=False).text


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        # A body with 31 nodes, and one with 63 characters, costs one step each time.
        ("{% for i in l %}" + SETS + "{{ n }}{% endfor %}", 4 + 3 + 1),
        ("{% for i in l %}" + "y" * 63 + "{% endfor %}", 4 + (1 + 189 // 64)),
        # 1 for the body, 32 for the call, 1 for its text and 1 to write it.
        ("{% for i in [[], []] recursive %}x{{ loop(i) }}{% endfor %}", 3 + 2 * 35 + 1 + 1),
        ("{% for i in [[], []] recursive %}{% continue %}{{ loop(i) }}{% endfor %}", 3 + 2 + 1 + 1),
        # Operations within others.
        ("{% macro f() %}{% set x = a == a %}{% endmacro %}{% set y = f() %}", 32 + 1 + 22 + 1 + 1),
        ("{% set x = (a == a) == true %}", 22 + 1),
        ("{% set x = (a ~ n)[1:] %}", 23 + 642 + 1),
        ("{% set x = (a == a) ~ n %}", 22 + 1 + 1 + 1 + 1),
        # Tests that compare values read them.
        ("{% set x = a is eq(a) %}", 8 + 22 + 1),
        ("{% set x = a is string %}", 1),
        # The text of a filter is charged before it is made, and again as a result.
        ("{% set x = a | replace('x', 'yy') %}", 8 + 11 + 1 + 1 + 21 + 21 + 1),
        ("{% set x = a | replace(old='x', new='yy') %}", 8 + 11 + 1 + 1 + 21 + 21 + 1),
        ("{% set x = a | replace('x', new='yy') %}", 8 + 11 + 1 + 1 + 21 + 21 + 1),
        ("{% set x = a | replace('x', 'yy', 1) %}", 8 + 11 + 1 + 1 + 1 + 21 + 11 + 1),
        ("{% set x = a | indent(-3) %}", 8 + 11 + 1 + 11 + 11 + 1),
        # The values are read twice; at most 4 + 2 * (640 + 8) characters are made.
        ("{% set x = '%s%s' | format(a, n) %}", 8 + 1 + 12 + 12 + (1 + 1300 // 64) + 11 + 1),
    ],
)
def test_the_steps_of_nested_operations_by_hand(source: str, steps: int) -> None:
    """`a` has 640 letters and costs 11 to read, `n` 1, and the list `l` has 3 elements."""
    assert spent(source) == steps


def test_a_body_is_charged_before_it_runs() -> None:
    source = "{% macro f() %}{% set x = u.b %}{% set y = 1 %}{% endmacro %}{{ f() }}"
    template = SandboxedTemplate(source, Budget(PLENTY, PLENTY))
    with pytest.raises(TemplateLimitError):  # after the call
        template.render(Budget(32, PLENTY), {})
    with pytest.raises(jinja2.UndefinedError, match="'u' is undefined"):
        template.render(Budget(33, PLENTY), {})


def test_a_text_that_is_written_in_parts_is_refused_before_its_end() -> None:
    """The steps would end later."""
    source = "{% for i in range(100) %}four{% set x = n | string %}{% endfor %}"
    template = SandboxedTemplate(source, Budget(PLENTY, PLENTY))
    with pytest.raises(TemplateLimitError, match="a text of more than 40 characters"):
        template.render(Budget(500, 40), VALUES)
    assert spent("x" * 64, 64) == 2  # the largest text costs no more than with a higher limit


def test_json_is_bounded_while_it_is_made() -> None:
    """One element after 100 spaces makes 105 characters."""

    def steps(value: object, indent: int | None, characters: int = PLENTY) -> int:
        budget = Budget(PLENTY, characters)
        to_json(budget, value, indent=indent)
        return PLENTY - budget.steps

    assert steps([1], 100, 105) == steps([1], 100)
    with pytest.raises(TemplateLimitError, match="a text of more than 104 characters"):
        steps([1], 100, 104)
    assert steps([0] * 50, 0) >= steps([0] * 50, None) + 50
    assert text_of("{{ {'b': 1, 'a': 1} | tojson }}") == '{"b": 1, "a": 1}'


def test_a_filter_gets_a_value_that_is_no_list() -> None:
    filters = limited_filters({"max": lambda value: value}, lambda: Budget(99, 99))
    assert filters["max"](5) == 5
    assert list(filters["max"](iter([5]))) == [5]


@pytest.mark.parametrize(
    ("source", "directly"),
    [
        ("", True),
        (BLOCK, True),
        ("{% if n %}" + BLOCK + "{% endif %}", True),
        ("{% for i in l %}" + BLOCK + "{% endfor %}", True),
        ("{% generation %}" + BLOCK + "{% endgeneration %}", True),
        ("{% set b %}x{% endset %}" + BLOCK, True),
        ("{% set b %}" + BLOCK + "{% endset %}", False),
        ("{% filter upper %}" + BLOCK + "{% endfilter %}", False),
        ("{% macro f() %}" + BLOCK + "{% endmacro %}", False),
        ("{% block b %}" + BLOCK + "{% endblock %}", False),
        ("{% call f() %}" + BLOCK + "{% endcall %}", False),
        ("{% for i in l recursive %}" + BLOCK + "{% endfor %}", False),
        ("{% set b %}{% if n %}" + BLOCK + "{% endif %}{% endset %}", False),
    ],
)
def test_a_template_reads_only_the_blocks_that_it_captures(source: str, directly: bool) -> None:
    assert SandboxedTemplate(source, Budget(PLENTY, PLENTY)).writes_directly == directly


def test_lines_of_statements_leave_no_space() -> None:
    """As in transformers, which sets `trim_blocks` and `lstrip_blocks`."""
    assert text_of("  {% set x = 1 %}\n  b") == "  b"


def test_a_method_gets_all_of_its_arguments() -> None:
    with pytest.raises(DataError, match=r"cannot render the messages: .*join"):
        text_of("{{ '-'.join(['a'], 'b') }}")
