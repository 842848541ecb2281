"""Errors that a user of checkpoints can encounter, and helpers for their messages."""

import difflib
from collections.abc import Container, Iterable


class CheckpointError(ValueError):
    """An error about a checkpoint, a view or a conversion.

    The message is one line that names the problem, its location and a remedy. Names from files may
    have any length, so the middle of a message over 1,500 characters is left out.
    """

    def __init__(self, message: str) -> None:
        if len(message) > 1500:
            message = f"{message[:1000]} ... {message[-400:]}"
        super().__init__(message)


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is torn (files are missing or too short) or the digest of a file differs."""


def shorten(message: object) -> str:
    """Returns text from a file or another library as one line of at most 300 characters."""
    text = " ".join(str(message).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``" (nearest: 'x')"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]!r})" if close else ""


def adapter_hint(name: str, known: Container[str]) -> str:
    """Returns the remedy for an extra tensor of a layer with a known weight, or an empty string.

    Layers that multiply by a product, such as a low-rank adapter, have tensors besides weight and
    bias.
    """
    layer, _, local = name.rpartition(".")
    if not layer or local == "bias" or f"{layer}.weight" not in known:
        return ""
    return (
        f": layer {layer!r} has more than its weight, such as an adapter; merge it into the weight "
        "first (megatron-train merge)"
    )
