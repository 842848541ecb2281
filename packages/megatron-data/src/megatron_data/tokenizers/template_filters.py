"""Filters and tests of chat templates, which charge their work to the budget of a template."""

import json
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from jinja2 import TemplateError

from megatron_data.tokenizers.template_limits import (
    FILTER,
    Budget,
    TemplateLimitError,
    check_percent,
    joined_size,
    replaced_size,
)

REMOVED = (
    *("batch", "center", "pprint", "random", "slice", "striptags", "urlize", "wordwrap", "xmlattr"),
)
"""Filters of Jinja that chat templates do not need, with random results or unbounded sizes."""

_SHALLOW = frozenset(
    (
        *("abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last"),
        *("length", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"),
    )
)
_GATHERING = frozenset(("join", "sum", "unique", "sort", "groupby", "min", "max"))
_COMPARING_TESTS = frozenset(
    (
        *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in"),
        *("le", "lessthan", "lower", "lt", "ne", "upper"),
    )
)
_MOST_DIGITS = 100
_MOST_INDENT = 100


def limited_filters(
    filters: Mapping[str, Callable[..., Any]], budget: Callable[[], Budget]
) -> dict[str, Callable[..., Any]]:
    """Returns Jinja's filters, changed to charge their work.

    Args:
        filters: Filters of Jinja by name.
        budget: Returns the budget of the template that is being rendered.
    """
    return {
        name: _limited(name, function, budget)
        for name, function in filters.items()
        if name not in REMOVED
    }


def limited_tests(
    tests: Mapping[str, Callable[..., Any]], budget: Callable[[], Budget]
) -> dict[str, Callable[..., Any]]:
    """Returns Jinja's tests; those that compare values charge their work."""
    return {
        name: _limited(name, function, budget) if name in _COMPARING_TESTS else function
        for name, function in tests.items()
    }


def _limited(
    name: str, function: Callable[..., Any], budget: Callable[[], Budget]
) -> Callable[..., Any]:
    context_arguments = int(hasattr(function, "jinja_pass_arg"))  # context or environment
    check = _CHECKS.get(name)

    @wraps(function)
    def limited(*arguments: Any, **options: Any) -> Any:
        left = budget()
        left.spend(FILTER)
        context, given = arguments[:context_arguments], arguments[context_arguments:]
        if name in _SHALLOW:
            left.spend_elements(given[0] if given else ())
        elif name in _GATHERING and given:
            given = (_counted(left, given[0]), *given[1:])
        if name not in _SHALLOW:
            for value in (*given, *options.values()):
                left.measure(value)
        if check is not None:
            check(left, given, options)
        result = function(*context, *given, **options)
        if isinstance(result, str):
            left.allocate(len(result))
        elif isinstance(result, list | tuple):
            left.spend_elements(result)
        return result

    return limited


def _counted(budget: Budget, values: Any) -> Any:
    """Returns a generator as a list and charges it; returns other values unchanged."""
    if isinstance(values, str | bytes | Mapping | list | tuple):
        return values
    try:
        return budget.collect(values)
    except TypeError:
        return values  # the filter raises the error


def _check_replace(budget: Budget, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    named = {**dict(zip(("text", "old", "new"), given, strict=False)), **options}
    if "old" in named and "new" in named:
        budget.allocate(replaced_size(*(_text(named[name]) for name in ("text", "old", "new"))))


def _check_indent(budget: Budget, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    width = given[1] if len(given) > 1 else options.get("width", 4)
    size = len(width) if isinstance(width, str) else int(width)
    text = _text(given[0])
    budget.allocate(len(text) + (text.count("\n") + 2) * max(size, 0))


def _check_format(budget: Budget, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    check_percent(budget, _text(given[0]), (*given[1:], *options.values()))


def _check_join(budget: Budget, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    between = given[1] if len(given) > 1 else options.get("d", "")
    budget.allocate(joined_size(budget, _text(between), given[0]))


def _check_round(budget: Budget, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    precision = given[1] if len(given) > 1 else options.get("precision")
    if precision is not None and abs(precision) > _MOST_DIGITS:
        raise TemplateLimitError(f"a precision of {precision!r:.20} digits is not supported")


def _check_sum(budget: Budget, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    start = given[2] if len(given) > 2 else options.get("start")
    if not isinstance(start, int | float | None):
        raise TemplateLimitError("only numbers are summed")


_CHECKS: Mapping[str, Callable[[Budget, tuple[Any, ...], Mapping[str, Any]], None]] = {
    "replace": _check_replace,
    "indent": _check_indent,
    "format": _check_format,
    "join": _check_join,
    "round": _check_round,
    "sum": _check_sum,
}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def to_json(
    budget: Budget,
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns a value as JSON, with the options of the filter in transformers.

    Jinja's filter would escape the special characters of HTML.
    """
    budget.measure(value)
    if indent is None and separators is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    if indent is not None and not 0 <= int(indent) <= _MOST_INDENT:
        raise TemplateError(f"tojson(indent={indent!r:.20}); give at most {_MOST_INDENT}")
    parts, size = [], 0
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    for part in encoder.iterencode(value):
        size += len(part)
        budget.spend(1)
        if size > budget.characters:
            budget.allocate(size)
        parts.append(part)
    return "".join(parts)
