"""Copies between the host and the device that nothing waits for."""

import torch
from jaxtyping import Shaped
from torch import Tensor


class HostCopy:
    """A tensor on its way to the host.

        flag = HostCopy(norm.isfinite())      # the host continues to queue work
        ...
        if flag.arrived and not flag.read():

    On a CUDA device the copy runs on the current stream into pinned memory. Reading it waits for
    the work that was queued before the copy, and for nothing that was queued after it. So a value
    that is read one step later costs no wait. On a CPU it has arrived at once.

    Args:
        t: The tensor; it may be changed afterwards.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, t: Shaped[Tensor, "..."]) -> None:
        # torch allocates pinned memory for such a copy.
        self._values = t.detach().to("cpu", non_blocking=True, copy=True)
        self._event: torch.cuda.Event | None = None
        if t.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `read` returns at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Shaped[Tensor, "..."]:
        """Returns the values, on the CPU; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def to_device(t: Shaped[Tensor, "..."], device: torch.device | str) -> Shaped[Tensor, "..."]:
    """Returns a tensor on a device; the copy may still be in progress on the device's stream.

    A copy from the host begins in pinned memory, since the driver can read only such memory by
    itself.
    """
    if t.device.type == "cpu" and torch.device(device).type == "cuda":
        t = t.pin_memory()
    return t.to(device, non_blocking=True)
