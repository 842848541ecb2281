import pytest
from megatron_infer import TextStream


class Bytes:
    """A decoder in which every token is one byte."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A decoder in which every token is a word, with a space before all words but the first."""

    def decode(self, ids: list[int]) -> str:
        return " ".join("abcdef"[i] for i in ids)


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 text", "a\u20ac\U0001f40b!", ""])
def test_pieces_concatenate_and_characters_are_never_split(text: str) -> None:
    stream = TextStream(Bytes())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


def test_an_incomplete_character_appears_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert [stream.push(byte) for byte in "a€".encode()[:-1]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_text_that_depends_on_the_previous_token_is_correct() -> None:
    stream = TextStream(Words())
    assert [stream.push(token) for token in (0, 1, 2)] == ["a", " b", " c"]


def test_text_that_follows_other_text_keeps_the_space_between() -> None:
    context = list(range(6)) * 3
    stream = TextStream(Words(), context=context)
    assert [stream.push(2), stream.push(0), stream.finish()] == [" c", " a", ""]
    assert TextStream(Words()).push(2) == "c"
