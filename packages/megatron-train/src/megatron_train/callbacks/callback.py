"""The hooks of a training loop."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_train.trainer import StepReport, Trainer


Listener = Callable[[int, dict[str, float]], None]
"""Told a step and losses: those of a log line, or of an evaluation."""


class Callback:
    """Something that happens around the steps of a run; every hook does nothing by default.

    A callback with a ``name`` has state of its own, which is kept in checkpoints as plain values.
    """

    name = ""

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step of this process."""

    def on_step(self, trainer: "Trainer", report: "StepReport") -> None:
        """After every step."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last step of this process."""

    def state(self) -> dict[str, Any]:
        """Return the state to keep in a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
