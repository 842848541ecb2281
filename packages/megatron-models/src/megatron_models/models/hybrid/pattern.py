"""Patterns of layers of hybrid models, in Megatron-LM's syntax.

>>> read_pattern("M*|M-").layers
'M*M-'
>>> read_pattern("M*|M-").stages
(range(0, 2), range(2, 4))

Importing this module does not import torch.
"""

from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from megatron_models.errors import ConfigError

SYMBOLS: Final = {
    "M": "Mamba-2",
    "G": "a gated delta net",
    "*": "attention",
    "D": "sparse attention",
    "-": "a dense feed-forward layer",
    "E": "a feed-forward layer of experts",
}
"""What each symbol of a pattern stands for."""

_LONGEST: Final = 100_000


class HybridPattern(NamedTuple):
    """A pattern of layers.

    Attributes:
        layers: One symbol for each layer.
        stages: Layers of each pipeline stage, or None if the pattern does not divide them.
    """

    layers: str
    stages: tuple[range, ...] | None


def read_pattern(text: str) -> HybridPattern:
    """Returns a pattern of symbols, divided into pipeline stages by ``|``.

    Raises:
        ConfigError: A symbol is unknown, or a stage or the whole pattern has no layer.
    """
    if len(text) > _LONGEST:
        raise ConfigError(f"has {len(text)} symbols; use at most {_LONGEST}")
    if unknown := next((symbol for symbol in text if symbol not in {*SYMBOLS, "|"}), None):
        known = ", ".join(f"{symbol} ({what})" for symbol, what in SYMBOLS.items())
        raise ConfigError(f"has the unknown symbol {unknown!r}; use {known}, and | between stages")
    parts = text.split("|")
    if not all(parts):
        raise ConfigError("has a pipeline stage without layers; put layers around each |")
    ends = accumulate(map(len, parts), initial=0)
    stages = tuple(range(start, stop) for start, stop in pairwise(ends))
    return HybridPattern("".join(parts), stages if len(parts) > 1 else None)
