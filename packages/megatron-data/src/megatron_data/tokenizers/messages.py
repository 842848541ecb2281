"""Messages of conversations, as Hugging Face transformers passes them to chat templates."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""`{"role": "user", "content": "…"}` with any other keys that a template uses."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


def completed(message: Message) -> Message:
    """Returns a message without nulls but that of its content, and with all names of reasoning."""
    message = {
        key: value for key, value in message.items() if value is not None or key == "content"
    }
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def without_null(message: Message) -> Message:
    """Returns a message without keys that have the value None."""
    return {key: value for key, value in message.items() if value is not None}
