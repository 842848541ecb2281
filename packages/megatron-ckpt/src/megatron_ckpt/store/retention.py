"""The rule for which checkpoints to keep."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ckpt.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Keeps the newest ``latest`` checkpoints and those of every ``every``-th iteration.

    ``latest=None`` keeps all. The newest complete checkpoint is always kept. Directories that are
    not complete checkpoints are never removed.
    """

    latest: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("latest", self.latest), ("every", self.every)):
            if value is not None and value < 1:
                raise CheckpointError(f"Retention({name}={value}): use at least 1, or None")

    def to_delete(self, iterations: Iterable[int]) -> list[int]:
        """Returns the complete ``iterations`` that the rule does not keep, oldest first."""
        if self.latest is None:
            return []
        older = sorted(set(iterations))[: -self.latest]
        return [n for n in older if self.every is None or n % self.every]
