"""The sandbox in which chat templates are rendered; imported only where jinja2 is installed."""

import json
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\ufdd0", "\ufdd1"
"""Put around what `{% generation %}` blocks write: code points that no text may hold."""

_PARTS = ("text", "image", "image_url", "video", "audio")


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END)]
        return nodes.Scope([marks[0], *body, marks[1]]).set_lineno(line)


def compiled(source: str) -> Template:
    """A template with what Hugging Face transformers gives templates, but the time of day.

    Raises:
        TemplateError: it is none.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        finalize=_written,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _written(value: Any) -> Any:
    """What is written of a value; null, or a list of parts, would be Python's words."""
    if value is None:
        raise TemplateError("it writes null as text, such as the content of a message without any")
    if isinstance(value, list) and any(map(_is_part, value)):
        raise TemplateError(
            "it writes a content of several parts as Python writes lists; give contents that are "
            "strings, or a template that reads parts"
        )
    return value


def _is_part(value: Any) -> bool:
    """Whether this is a part of a message's content, such as `{"type": "text", "text": "…"}`."""
    return isinstance(value, dict) and value.get("type") in _PARTS


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON as it is; Jinja's own filter escapes what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)
