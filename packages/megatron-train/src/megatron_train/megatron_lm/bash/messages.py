"""Texts of errors and notes about a line of a script: one line each, long texts shortened."""

from megatron_train.errors import TrainError

_LONGEST = 240


def error_at(name: str, line: int, text: str) -> TrainError:
    """Returns an error at a line of the script ``name``."""
    return TrainError(f"{name}: {note_at(line, text)}")


def note_at(line: int, text: str) -> str:
    """Returns a text with its line number.

    Of a long text both ends stay: what the script says, and what is wrong with it.
    """
    text = " ".join(text.replace("\0", "").split())
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"
    return f"line {line}: {text}"
