"""Streaming conversion of tokens to text."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

REPLACEMENT = "\ufffd"

CONTEXT = 8
"""The largest number of preceding tokens that are decoded together with the new ones."""


@runtime_checkable
class Decoder(Protocol):
    """The method of a tokenizer that streaming needs."""

    def decode(self, tokens: list[int], /) -> str:
        """Returns the text of tokens; bytes that are not valid UTF-8 become U+FFFD."""
        ...


class TextStream:
    """Converts the tokens of one request to pieces of text that concatenate to the whole text.

    A character of several bytes may span tokens, and the text of a token may depend on the previous
    one. Each piece is therefore the difference between two decodings that start at the same token.
    Text that ends in an incomplete character is held back until the character is complete.

    Args:
        decoder: A tokenizer.
        context: The tokens before the first new one. Their text is not returned, but a space
            between them and the first new token is.
    """

    def __init__(self, decoder: Decoder, context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._tokens = _from_a_character(decoder, list(context[-CONTEXT:]))
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now final, which may be empty."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def finish(self) -> str:
        """Returns the text that was held back; incomplete characters become U+FFFD."""
        piece = self._pending()
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def _pending(self) -> str:
        context = self._decoder.decode(self._tokens[self._start : self._shown])
        return self._decoder.decode(self._tokens[self._start :])[len(context) :]


def _from_a_character(decoder: Decoder, tokens: list[int]) -> list[int]:
    """Returns the tokens from the first one that begins a character.

    Tokenizers with byte fallback decode a sequence of bytes as a whole: if it begins within a
    character, they decode every byte of it to U+FFFD, those of later characters too.
    """
    for start in range(len(tokens)):
        if not decoder.decode(tokens[start:]).startswith(REPLACEMENT):
            return tokens[start:]
    return tokens
