"""Settings for choosing tokens. This module does not import torch."""

from dataclasses import dataclass, field

from megatron_infer.errors import InferError


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one request.

    Logits are divided by ``temperature``. Then only the ``top_k`` largest are kept, and of these
    only the smallest set of tokens whose probability reaches ``top_p``. The next token is drawn
    from the renormalised rest. The most likely token is always kept.
    """

    max_new_tokens: int = field(
        default=128,
        metadata={
            "help": "largest number of tokens to generate",
            "flag": "--max-new-tokens",
            "also": "--tokens-to-generate",  # the name in requests to the server
        },
    )
    temperature: float = field(
        default=1.0,
        metadata={
            "help": "divisor of the logits; lower is more predictable, 0 takes the likeliest token",
            "flag": "--temperature",
        },
    )
    top_k: int = field(
        default=0,
        metadata={"help": "draw from the N likeliest tokens; 0 is no limit", "flag": "--top-k"},
    )
    top_p: float = field(
        default=1.0,
        metadata={
            "help": "draw from the likeliest tokens that together reach probability X",
            "flag": "--top-p",
        },
    )
    seed: int | None = field(
        default=None,
        metadata={
            "help": "seed of the random numbers of this request; unset: a new one each time",
            "flag": "--seed",
        },
    )

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InferError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise InferError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise InferError(f"top_k must be at least 0 (no limit), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InferError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InferError(f"seed must lie in [0, 2^63), got {self.seed}")
