"""How the tokens of a continuation are chosen. Nothing here imports torch."""

from dataclasses import dataclass, field

from megatron_infer.errors import InferError


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request.

    Logits are divided by ``temperature``, then all but the ``top_k`` largest are dropped, then all
    but the smallest set of tokens whose probability reaches ``top_p``; the next token is drawn from
    what is left, renormalised. The largest token always stays.
    """

    max_new_tokens: int = field(
        default=128,
        metadata={
            "help": "tokens to generate at most",
            "flag": "--max-new-tokens",
            "also": "--tokens-to-generate",  # as the server's requests have it
        },
    )
    temperature: float = field(
        default=1.0,
        metadata={
            "help": "divides the logits: lower is more predictable; 0 takes the likeliest token",
            "flag": "--temperature",
        },
    )
    top_k: int = field(
        default=0,
        metadata={"help": "draw from the K likeliest tokens; 0 is no limit", "flag": "--top-k"},
    )
    top_p: float = field(
        default=1.0,
        metadata={
            "help": "draw from the likeliest tokens that together reach probability P",
            "flag": "--top-p",
        },
    )
    seed: int | None = field(
        default=None,
        metadata={
            "help": "seed of this request's random numbers; unset draws a new one each time",
            "flag": "--seed",
        },
    )

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InferError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise InferError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise InferError(f"top_k must be 0 (no limit) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InferError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InferError(f"seed must lie in [0, 2^63), got {self.seed}")
