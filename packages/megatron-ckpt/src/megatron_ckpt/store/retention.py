"""Which checkpoints to keep."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ckpt.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Keeps the newest ``latest`` checkpoints, and for ever those of each ``every``-th iteration.

    ``latest=None`` keeps all. The newest complete checkpoint is kept whatever the rule, and what is
    not a complete checkpoint is never removed.
    """

    latest: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("latest", self.latest), ("every", self.every)):
            if value is not None and value < 1:
                raise CheckpointError(f"Retention({name}={value}): give 1 or more, or None")

    def to_delete(self, iterations: Iterable[int]) -> list[int]:
        """Returns those of the complete ``iterations`` that the rule lets go, oldest first."""
        if self.latest is None:
            return []
        older = sorted(set(iterations))[: -self.latest]
        return [n for n in older if self.every is None or n % self.every]
