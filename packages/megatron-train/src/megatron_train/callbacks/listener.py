"""The type of functions that receive losses."""

from collections.abc import Callable

Listener = Callable[[int, dict[str, float]], None]
"""Called with the number of a step and the losses of a log line or an evaluation, by name."""
