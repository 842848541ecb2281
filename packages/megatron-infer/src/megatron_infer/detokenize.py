"""Text from tokens that arrive one at a time."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

REPLACEMENT = "\ufffd"

CONTEXT = 8
"""Tokens of the text before that are decoded with the new ones."""


@runtime_checkable
class Decoder(Protocol):
    """What streaming needs of a tokenizer."""

    def decode(self, tokens: list[int], /) -> str:
        """Returns the text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        ...


class TextStream:
    """Turns one request's tokens into pieces of text whose concatenation is the whole text.

    A character of several bytes may span tokens, and the text of a token may depend on the one
    before it. So each piece is the difference between two decodings that start at the same token,
    and text that ends in an incomplete character is held back until the character is whole.

    Args:
        decoder: a tokenizer.
        context: tokens the new ones follow; their text is not shown again, but a space between
            them and the first new token is.
    """

    def __init__(self, decoder: Decoder, context: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._tokens: list[int] = list(context[-CONTEXT:])
        self._start = 0
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now certain, possibly empty."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def finish(self) -> str:
        """Returns the text still held back; incomplete characters are U+FFFD."""
        piece = self._pending()
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def _pending(self) -> str:
        context = self._decoder.decode(self._tokens[self._start : self._shown])
        return self._decoder.decode(self._tokens[self._start :])[len(context) :]
