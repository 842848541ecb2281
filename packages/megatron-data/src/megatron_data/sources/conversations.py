"""Lines of JSON that hold conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from ..errors import DataError
from ..tokenizers.chat import Message

_ROLES = {"human": "user", "gpt": "assistant"}


class ConversationRow(NamedTuple):
    """One line.

    Attributes:
        place: file and line.
        conversations: each but the first begins with a system message.
        tools: what their assistants may use.
    """

    place: str
    conversations: list[list[Message]]
    tools: Sequence[Mapping[str, Any]] | None


def read_row(place: str, line: bytes) -> ConversationRow:
    """Read one line: `messages` of `role` and `content`, or `conversations` of `from` and `value`.

    Raises:
        DataError: it holds no conversation.
    """
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg})") from None
    match content:
        case {"messages": [*messages]}:
            pass
        case {"conversations": [*messages]}:
            messages = [
                {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
                if isinstance(message, dict) and {"from", "value"} <= message.keys()
                else message
                for message in messages
            ]
        case _:
            raise DataError(f'{place}: no conversation; a line must be like {{"messages": […]}}')
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise DataError(f'{place}: every message must be like {{"role": "user", "content": "…"}}')
    return ConversationRow(place, _cut(messages), content.get("tools"))


def _cut(messages: list[Message]) -> list[list[Message]]:
    """Conversations, each of which but the first begins with a system message."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations
