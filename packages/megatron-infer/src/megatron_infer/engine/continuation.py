"""The result of generation from one prompt."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "positions"]


@dataclass(frozen=True)
class Continuation:
    """The tokens after a prompt and the reason why they end.

    ``finish_reason`` is ``stop`` (a stop token was chosen, which is not included), ``length``
    (``max_new_tokens`` are reached) or ``positions`` (the model has no position for another token).

    ``log_probs``, if requested, has the natural logarithm of the probability of every token of the
    prompt but the first, and of ``tokens``, each given all previous tokens. These are the
    probabilities of the model itself, without temperature, top-k and top-p.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    log_probs: tuple[float, ...] | None = None
