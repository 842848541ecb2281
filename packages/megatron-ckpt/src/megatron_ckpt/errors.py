"""Errors a user of checkpoints can meet, and the words that help to mend them."""

import difflib
from collections.abc import Container, Iterable


class CheckpointError(ValueError):
    """What was wrong with a checkpoint, a view or a conversion, where, and what to do: one line.

    A name that comes from a file may have any length: of a message over 1,500 characters the middle
    is left out.
    """

    def __init__(self, message: str) -> None:
        if len(message) > 1500:
            message = f"{message[:1000]} ... {message[-400:]}"
        super().__init__(message)


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is torn or its bytes changed: files missing, short, or of another digest."""


def shorten(message: object) -> str:
    """Returns what comes from a file or another library as one line of at most 300 characters."""
    text = " ".join(str(message).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``" (nearest: 'x')"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]!r})" if close else ""


def adapter_hint(name: str, known: Container[str]) -> str:
    """Returns what to do about a tensor that stands beside a known weight, or an empty string.

    Layers that multiply by a product, such as a low-rank adapter, have more than weight and bias.
    """
    layer, _, local = name.rpartition(".")
    if not layer or local == "bias" or f"{layer}.weight" not in known:
        return ""
    return (
        f": layer {layer!r} multiplies by more than its weight, such as an adapter; fold it in "
        "first (megatron-train merge)"
    )
