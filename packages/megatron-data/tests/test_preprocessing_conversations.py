"""The encoder of conversations alone: limits, truncation and counts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError, HuggingFaceTokenizer
from megatron_data.preprocessing.conversation_encoding import ConversationEncoder
from megatron_data.preprocessing.parts import count_vocabulary_tokens
from megatron_data.sources.protocol import Fault, Row
from megatron_data.tokenizers import ChatTemplate

pytest.importorskip("jinja2")


class Rows:
    """A chunk of conversations, each of one answer."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = answers

    def rows(self, max_bytes: int | None = None) -> Iterator[Row]:
        for number, answer in enumerate(self._answers, start=1):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
            yield Row(number, None, 9, {"messages": messages})

    def fault(self, row: Row, kind: str, reason: str) -> Fault:
        raise AssertionError((kind, reason))

    items = span = digest = stored = None


@pytest.mark.parametrize(
    ("most", "over", "lengths", "tallies"),
    [
        (None, "truncate", [[4], [5], [6]], {"truncated": 0, "answered": 6, "conversations": 3}),
        (6, "truncate", [[4], [5], [6]], {"truncated": 0, "answered": 6, "conversations": 3}),
        (5, "truncate", [[4], [5], [5]], {"truncated": 1, "answered": 6, "conversations": 3}),
        (4, "truncate", [[4], [4], [4]], {"truncated": 2, "answered": 5, "conversations": 3}),
        (4, "drop", [[4], [], []], {"dropped": 2, "answered": 1, "conversations": 1}),
        (2, "truncate", [[], [], []], {"unanswered": 3}),
    ],
)
def test_conversations_have_at_most_as_many_tokens_as_asked_for(
    tokenizer: HuggingFaceTokenizer,
    most: int | None,
    over: Any,
    lengths: list[list[int]],
    tallies: dict[str, int],
) -> None:
    """Two tokens of the user, one for each letter of the answer, and the end."""
    source = "{% for m in messages %}{% if m.role == 'user' %}[]{% else %}{% generation %}"
    source += "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}<|endoftext|>"
    assert [len(tokenizer.encode(text)) for text in ("[]", "[]x", "[]xxx")] == [2, 3, 5]
    encoder = ConversationEncoder(tokenizer, ChatTemplate(source), "assistant", most, over)
    found = encoder(Rows(["x", "xx", "xxx"]))  # type: ignore[arg-type]
    tokens, mask = found.outputs
    ends = np.cumsum(tokens.sequences)
    assert [each.tolist() for each in np.split(tokens.lengths, ends)[:-1]] == lengths
    assert int(mask.tokens.sum()) == tallies.get("answered", 0)
    assert mask.lengths.tolist() == tokens.lengths.tolist()
    numbers = [len(tokens.tokens), len(mask.tokens)]
    assert count_vocabulary_tokens(numbers, encoder.outputs) == sum(map(sum, lengths))
    assert {key: value for key, value in found.tallies.items() if value or key in tallies} == (
        tallies
    )


def test_a_conversation_needs_room_for_a_token_and_the_one_before_it(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    template = ChatTemplate("a")
    assert ConversationEncoder(tokenizer, template, "all", 2).max_tokens == 2
    with pytest.raises(DataError, match="--max-tokens 1: a token is predicted from the one before"):
        ConversationEncoder(tokenizer, template, "all", 1)
    for options, message in (
        ({"loss": "none"}, "loss='none'; give one of assistant, all"),
        ({"over_length": "cut"}, "over_length='cut'; give one of truncate, drop"),
    ):
        with pytest.raises(DataError, match=message):
            ConversationEncoder(tokenizer, template, **options)  # type: ignore[arg-type]


def test_the_first_token_of_a_conversation_is_never_counted(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    """No token comes before it, from which it could be predicted."""
    source = "{% for m in messages if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    source += "{% endgeneration %}{% endfor %}<|endoftext|>"
    encoder = ConversationEncoder(tokenizer, ChatTemplate(source))
    found = encoder(Rows(["x", "xx", "xxx"]))  # type: ignore[arg-type]
    tokens, mask = found.outputs
    assert tokens.sequences.tolist() == [0, 1, 1]
    assert mask.tokens.tolist() == [1, 1, 0, 1, 1, 1, 0]
    assert found.tallies["answered"] == 1 + 2 and found.tallies["unanswered"] == 1


def test_a_row_that_is_no_conversation_is_a_fault_among_others(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    class Broken(Rows):
        def rows(self, max_bytes: int | None = None) -> Iterator[Row]:
            for row in super().rows(max_bytes):
                yield row._replace(values={"messages": 5}) if row.number == 2 else row

        def fault(self, row: Row, kind: str, reason: str) -> Fault:
            return Fault(f"a:{row.number}", kind, reason, "a", row.number)

    encoder = ConversationEncoder(tokenizer, ChatTemplate("{{ messages[-1].content }}"), "all")
    found = encoder(Broken(["xx", "xx", "xxx"]))  # type: ignore[arg-type]
    assert found.outputs[0].sequences.tolist() == [1, 1]
    assert found.refused == [1]
    (fault,) = found.faults
    assert (fault.location, fault.kind) == ("a:2", "message")
