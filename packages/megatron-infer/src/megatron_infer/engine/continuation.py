"""What is generated from one prompt."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "positions"]


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a prompt, and why they end.

    ``finish_reason`` is ``stop`` (a stop token came; it is left out), ``length``
    (``max_new_tokens`` are there) or ``positions`` (the model has no position for another token).

    If they were asked for, ``log_probs`` holds the natural logarithm of the probability of every
    token of the prompt but the first, and of ``tokens``, each given all before it, by the model
    itself: temperature, top-k and top-p have no part in it. Otherwise it is None.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    log_probs: tuple[float, ...] | None = None
