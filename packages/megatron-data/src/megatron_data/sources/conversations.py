"""Objects of JSON, or rows of tables, that hold conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_data.errors import DataError
from megatron_data.sources.protocol import UnreadableError
from megatron_data.tokenizers.chat import Message

KEYS = ("messages", "conversations", "instruction", "input", "output", "tools")
"""Keys or columns that conversations stand under."""

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
    """One line or row.

    Attributes:
        place: file and line, as errors name it.
        conversations: each but the first begins with a system message.
        tools: what their assistants may use.
    """

    place: str
    conversations: list[list[Message]]
    tools: Sequence[Mapping[str, Any]] | None


def read_row(place: str, line: bytes) -> ConversationRow:
    """Reads one line; see `row_of` for what it may hold.

    Raises:
        DataError: it holds no conversation.
    """
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg})") from None
    try:
        return row_of(place, content)
    except UnreadableError as error:
        raise DataError(f"{place}: {error.reason}") from None


def row_of(place: str, content: Any) -> ConversationRow:
    """Returns the conversations of an object.

    It has `messages` of `role` and `content`; or `conversations` of `from` and `value`; or
    `instruction`, `output` and maybe `input`, as in Alpaca: the instruction in Alpaca's words is
    what the user says, the output what the assistant answers.

    A message without content, or of null, is that of an assistant who calls tools.

    Raises:
        UnreadableError: it holds no conversation, or a message is none.
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
    said = [_message(number, message) for number, message in enumerate(messages, start=1)]
    tools = content.get("tools")
    if isinstance(tools, str):  # tables hold them as JSON: their structs differ from row to row
        try:
            tools = orjson.loads(tools) if tools.strip() else None
        except orjson.JSONDecodeError as error:
            raise UnreadableError("message", f"its tools are not JSON ({error.msg})") from None
    if tools is not None and not isinstance(tools, list):
        raise UnreadableError("message", f"its tools are {tools!r:.40}, not a list")
    return ConversationRow(place, _cut(said), tools)


def _turn(message: Any) -> Any:
    """A message of `from` and `value` with the names of the others; anything else as it is."""
    match message:
        case {"from": str(role), "value": content}:
            return {"role": _ROLES.get(role, role), "content": content}
    return message


def _instructed(content: Mapping[str, Any]) -> list[Message]:
    given = content.get("input") or ""
    if not isinstance(given, str):
        raise UnreadableError("message", f"its input is {given!r:.40}, not a string")
    wording = _WITH_INPUT if given else _WITHOUT_INPUT
    asked = wording.format(instruction=content["instruction"], input=given)
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": content["output"]},
    ]


def _message(number: int, message: object) -> Message:
    """Returns a message that a template may be given: it has a role and a content."""
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
        f"message {number} ({message['role']}) has no content, which only an assistant's may lack "
        "that has tool_calls",
    )


def _cut(messages: list[Message]) -> list[list[Message]]:
    """Conversations, each of which but the first begins with a system message."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations
