"""What hears of losses."""

from collections.abc import Callable

Listener = Callable[[int, dict[str, float]], None]
"""Called with the number of a step and losses: those of a log line, or of an evaluation."""
