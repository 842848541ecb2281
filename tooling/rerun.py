"""A recorder of passes for tests without a GPU, in the place of CUDA graphs."""

from collections.abc import Callable, Sequence

from torch import Tensor


class Rerun:
    """Runs a recorded function again, into the memory of its recorded results.

    As with a CUDA graph, a replay reads the tensors of the recorded run, at their addresses, and
    overwrites its results.

    Attributes:
        recorded: Number of recorded functions.
        replayed: Number of replays.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(
        self, run: Callable[[], Sequence[Tensor | None]]
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Runs a function; returns its results, and what computes them again."""
        results = [*run()]
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for into, value in zip(results, run(), strict=True):
                if into is not None and value is not None and into.data_ptr() != value.data_ptr():
                    into.copy_(value)

        return results, replay
