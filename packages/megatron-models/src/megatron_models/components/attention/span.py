"""How far a layer's attention reaches, as plain data. Importing this module loads no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Limits of the keys that a query attends to. Layers with equal spans share one mask.

    Attributes:
        window: Number of positions a token attends to, its own included (Beltagy et al. 2020;
            Mistral). None means all.
        chunk: A token attends only to tokens of its chunk of this many positions (Llama 4). None
            means all.
    """

    window: int | None = None
    chunk: int | None = None

    def narrows(self, length: int) -> bool:
        """Returns whether the span hides tokens of a sequence of this length."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))

    def pairs(self, tokens: int, squared_lengths: int) -> int:
        """Returns twice the query-key pairs of causal attention.

        Full attention has half of the square of a length. Documents count with their mean length,
        which is exact if all are equally long.

        Args:
            tokens: Number of tokens ``T`` of all documents.
            squared_lengths: Sum of the squared lengths ``S`` of the documents.
        """
        pairs = squared_lengths
        if self.window is not None and self.window * tokens < squared_lengths:
            # T/l documents of l = S/T tokens: all pairs within the window of one, without a corner.
            pairs = 2 * self.window * tokens - (self.window * tokens) ** 2 // squared_lengths
        if self.chunk is not None:
            pairs = min(pairs, self.chunk * tokens)
        return pairs


EVERYTHING = Span()
"""All tokens that the mask allows."""
