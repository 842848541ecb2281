"""Work on a CUDA stream beside the one that computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream on which copies, collectives and what follows them run beside computation.

        side = SideStream.of(device)
        with side.running():      # after all work that the current stream has so far
            ...
        side.join()               # the current stream continues after the work of `side`

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, device: torch.device) -> "SideStream | None":
        """Returns a stream; None on a CPU, where the host itself waits for communication."""
        return cls(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Queues the work of the block on this stream, after that of the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Lets the current stream wait for the work of this stream."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def uses(self, t: Tensor) -> None:
        """Keeps the memory of a tensor until the work of this stream is complete."""
        t.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Returns a point after the work that this stream has so far."""
        mark: torch.cuda.Event = self._stream.record_event()
        return mark

    def hand_over(self, t: Tensor, mark: torch.cuda.Event) -> None:
        """Lets the current stream use a tensor that this stream made before `mark`."""
        current = torch.cuda.current_stream()
        current.wait_event(mark)
        t.record_stream(current)
