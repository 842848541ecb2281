"""Text from tokens that arrive one at a time."""

from typing import Protocol, runtime_checkable

REPLACEMENT = "\ufffd"


@runtime_checkable
class Decoder(Protocol):
    """What streaming needs of a tokenizer."""

    def decode(self, tokens: list[int], /) -> str:
        """Return the text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        ...


class TextStream:
    """Turns one request's tokens into pieces of text whose concatenation is the whole text.

    A character of several bytes may span tokens, and the text of a token may depend on the one
    before it. So each piece is the difference between two decodings that start at the same token,
    and text that ends in an incomplete character is held back until the character is whole.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain, possibly empty."""
        self._tokens.append(token)
        piece = self._pending()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def finish(self) -> str:
        """Return the text still held back; incomplete characters are U+FFFD."""
        piece = self._pending()
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def _pending(self) -> str:
        before = self._decoder.decode(self._tokens[self._start : self._shown])
        return self._decoder.decode(self._tokens[self._start :])[len(before) :]
