"""Conversations of a line or row: its formats, and what is refused."""

import json
from typing import Any

import pytest
from megatron_data import DataError
from megatron_data.sources.conversations import read_row


@pytest.mark.parametrize("given", ["", "Some input."])
def test_an_instruction_has_the_wording_of_alpaca(given: str) -> None:
    line = json.dumps({"instruction": "Do it.", "input": given, "output": "Done."}).encode()
    ((user, assistant),) = read_row("a:1", line).conversations
    wording = (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDo it.\n\n### Input:\nSome input.\n\n### Response:"
        if given
        else "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nDo it.\n\n### Response:"
    )
    assert user == {"role": "user", "content": wording}
    assert assistant == {"role": "assistant", "content": "Done."}


def test_each_system_message_begins_a_conversation() -> None:
    roles = ["user", "gpt", "system", "human", "gpt", "system", "system"]
    turns = [{"from": role, "value": str(at)} for at, role in enumerate(roles)]
    found = read_row("a:1", json.dumps({"conversations": turns}).encode()).conversations
    assert [[message["content"] for message in talk] for talk in found] == [
        ["0", "1"],
        ["2", "3", "4"],
        ["5"],
        ["6"],
    ]
    assert [message["role"] for message in found[0]] == ["user", "assistant"]
    assert found[1][1]["role"] == "user"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"messages": [{"role": "user"}]}, r"message 1 \(user\) has no content"),
        ({"messages": [{"role": "assistant"}]}, r"message 1 \(assistant\) has no content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": 1}]}, "message 2 is not like"),
        ({"messages": ["a"]}, "message 1 is not like"),
        ({"messages": {}}, "no conversation; a line must be like"),
        ({"messages": [], "tools": "["}, "its tools are not JSON"),
        ({"messages": [], "tools": {"a": 1}}, "its tools are {'a': 1}, not a list"),
        ({"instruction": "a", "output": "b", "input": 3}, "its input is 3, not a string"),
    ],
)
def test_conversations_that_cannot_be_read_name_the_message(content: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^a:7: {message}"):
        read_row("a:7", json.dumps(content).encode())


@pytest.mark.parametrize(
    ("tools", "expected"), [("", None), (" ", None), ("[1]", [1]), (None, None)]
)
def test_tools_may_be_text_of_a_table(tools: str | None, expected: object) -> None:
    content = {"messages": [], "tools": tools}
    assert read_row("a:1", json.dumps(content).encode()).tools == expected


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_a_message_that_calls_a_tool_needs_no_content(key: str) -> None:
    message = {"role": "assistant", key: [{}]}
    ((found,),) = read_row("a:1", json.dumps({"messages": [message]}).encode()).conversations
    assert found == {**message, "content": None}
    with pytest.raises(DataError, match=r"message 1 \(user\) has no content"):
        read_row("a:1", json.dumps({"messages": [{**message, "role": "user"}]}).encode())
