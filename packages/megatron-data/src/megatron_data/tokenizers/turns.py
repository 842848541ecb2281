"""Finds the text of assistants in conversations of templates without `{% generation %}` blocks.

The text of an assistant begins after the generation prompt and ends with the end of the turn. If
the text of a conversation begins with the text of its first messages, two renderings give both.
Other templates write a turn differently once another turn follows, such as without its reasoning.
For them, a rendering with a mark instead of the message's content shows where the content is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

from megatron_data.errors import DataError
from megatron_data.tokenizers.generation_blocks import Span, TemplateBudgetError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[Messages, bool], str]
"""Renders messages, with or without the generation prompt."""

ASSISTANT = "assistant"
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # code points that are not valid in text
_MARKER = re.compile(r"[<\[][^\s]*[>\]]\s*")
_HALF_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")


def find_turns(render: Render, messages: Messages, text: str) -> list[Span]:
    """Returns the spans of the text of assistants.

    Args:
        render: Renders messages with the template.
        messages: The conversation.
        text: Its text.

    Raises:
        DataError: The text of an assistant cannot be found.
    """
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message.get("role") != ASSISTANT:
            continue
        before = render(messages[:number], True)
        span = _by_beginnings(render, messages, number, text, before)
        span = span or _by_mark(render, messages, number, text, before)
        if span is None or (spans and span[0] < spans[-1][1]):
            raise DataError(
                f"the chat template writes message {number + 1} differently without the "
                "messages after it, so the text of the assistant cannot be found; put "
                "{% generation %} and {% endgeneration %} around it in the template"
            )
        spans.append(span)
    return spans


def _by_beginnings(
    render: Render, messages: Messages, number: int, text: str, before: str
) -> Span | None:
    """Returns the span if the conversation's beginnings are beginnings of its text."""
    after = render(messages[: number + 1], False)
    if after.startswith(before) and text.startswith(after):
        return len(before), len(after)
    return None


def _by_mark(
    render: Render, messages: Messages, number: int, text: str, before: str
) -> Span | None:
    """Returns the span that follows from the position of the message's content."""
    message = messages[number]
    mark = next((each for each in _MARKS if each not in text), None)
    if mark is None or not isinstance(message.get("content"), str):
        return None
    marked = {**message, "content": mark}
    whole = _around(render, [*messages[:number], marked, *messages[number + 1 :]], mark)
    alone = _around(render, [*messages[:number], marked], mark)
    if whole is None or alone is None or not text.endswith(whole[1]):
        return None
    content_end = len(text) - len(whole[1])
    start = _start(render, messages[:number], text[:content_end], whole[0], alone[0], before)
    if start is None or not whole[0].startswith(text[:start]):
        return None
    rest, end = text[content_end:], alone[1]
    if not rest.startswith(end):  # such as a template that ends the conversation with a token
        shared = _HALF_MARKER.sub("", _shared(rest, end))
        if not _MARKER.fullmatch(end[len(shared) :]):
            return None
        end = shared
    return start, content_end + len(end)


def _around(render: Render, messages: Messages, mark: str) -> tuple[str, str] | None:
    """Returns the text before and after a mark; None if it is not there once."""
    try:
        parts = render(messages, False).split(mark)
    except TemplateBudgetError:
        raise
    except DataError:
        return None
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _start(
    render: Render, earlier: Messages, text: str, whole: str, alone: str, before: str
) -> int | None:
    """Returns where the text after the generation prompt begins.

    Args:
        render: Renders messages with the template.
        earlier: The messages before that of the assistant.
        text: The text up to the end of the message's content.
        whole: The text before the mark.
        alone: The text before the mark without later messages.
        before: The text of the earlier messages with the generation prompt.
    """
    if text.startswith(before):
        return len(before)
    lead = alone.removeprefix(before)
    if alone.startswith(before) and whole.endswith(lead):
        start = len(whole) - len(lead)
        return start if text.startswith(whole[:start]) else None
    stem = render(earlier, False)
    if not (before.startswith(stem) and text.startswith(stem) and whole.startswith(stem)):
        return None
    prompt = reduce(_shared, [each[len(stem) :] for each in (before, text, whole)])
    return len(stem) + len(_HALF_MARKER.sub("", prompt))


def _shared(one: str, other: str) -> str:
    """Returns the longest common beginning of two texts."""
    pairs = zip(one, other, strict=False)
    differ = (index for index, (mine, theirs) in enumerate(pairs) if mine != theirs)
    return one[: next(differ, min(len(one), len(other)))]
