"""Parses JSON objects and rows of tables that hold conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_data.errors import DataError
from megatron_data.sources.protocol import UnreadableError
from megatron_data.tokenizers.messages import Message

KEYS = ("messages", "conversations", "instruction", "input", "output", "tools")
"""Keys or columns of conversations."""

_ROLES = {"human": "user", "gpt": "assistant"}
_CALLS = ("tool_calls", "function_call")
_WANTED = (
    'a line must be like {"messages": […]}, {"conversations": […]} or {"instruction": "…", '
    '"output": "…"}'
)
_WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{input}

### Response:"""
_WITHOUT_INPUT = """\
Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Response:"""


class ConversationRow(NamedTuple):
    """The conversations of one line or row.

    Attributes:
        location: File and line, for errors.
        conversations: The conversations; each but the first begins with a system message.
        tools: Tools of the assistant.
    """

    location: str
    conversations: list[list[Message]]
    tools: Sequence[Mapping[str, Any]] | None


def read_row(location: str, line: bytes) -> ConversationRow:
    """Parses one line; see `row_of` for the formats.

    Raises:
        DataError: The line has no conversation.
    """
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{location}: not JSON ({error.msg})") from None
    try:
        return row_of(location, content)
    except UnreadableError as error:
        raise DataError(f"{location}: {error.reason}") from None


def row_of(location: str, content: Any) -> ConversationRow:
    """Returns the conversations of an object.

    The object has `messages` with `role` and `content`; or `conversations` with `from` and `value`;
    or, as in Alpaca, `instruction`, `output` and optionally `input`, which become a message of the
    user in Alpaca's wording and the answer of the assistant.

    Only a message of an assistant that calls tools may have no content or null.

    Raises:
        UnreadableError: The object has no conversation, or a message is invalid.
    """
    match content:
        case {"messages": [*messages]}:
            pass
        case {"conversations": [*messages]}:
            messages = [_turn(message) for message in messages]
        case {"instruction": str(), "output": str()}:
            messages = _instructed(content)
        case _:
            raise UnreadableError("message", f"no conversation; {_WANTED}")
    checked = [_message(number, message) for number, message in enumerate(messages, start=1)]
    tools = content.get("tools")
    if isinstance(tools, str):  # JSON in a table, because the structs of tools differ
        try:
            tools = orjson.loads(tools) if tools.strip() else None
        except orjson.JSONDecodeError as error:
            raise UnreadableError("message", f"its tools are not JSON ({error.msg})") from None
    if tools is not None and not isinstance(tools, list):
        raise UnreadableError("message", f"its tools are {tools!r:.40}, not a list")
    return ConversationRow(location, _split(checked), tools)


def _turn(message: Any) -> Any:
    """Converts a message of `from` and `value` to `role` and `content`."""
    match message:
        case {"from": str(role), "value": content}:
            return {"role": _ROLES.get(role, role), "content": content}
    return message


def _instructed(content: Mapping[str, Any]) -> list[Message]:
    given = content.get("input") or ""
    if not isinstance(given, str):
        raise UnreadableError("message", f"its input is {given!r:.40}, not a string")
    prompt = _WITH_INPUT if given else _WITHOUT_INPUT
    request = prompt.format(instruction=content["instruction"], input=given)
    return [
        {"role": "user", "content": request},
        {"role": "assistant", "content": content["output"]},
    ]


def _message(number: int, message: object) -> Message:
    """Checks that a message has a role and a content, and returns it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnreadableError(
            "message",
            f'message {number} is not like {{"role": "user", "content": "…"}}',
        )
    if message.get("content") is not None:
        return message
    if message["role"] == "assistant" and any(message.get(key) for key in _CALLS):
        return {**message, "content": None}
    raise UnreadableError(
        "message",
        f"message {number} ({message['role']}) has no content; only a message of the assistant "
        "with tool_calls may lack it",
    )


def _split(messages: list[Message]) -> list[list[Message]]:
    """Splits messages into conversations at each system message."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations
