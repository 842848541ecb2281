"""Values that are read on the host without waiting for the device."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch
from megatron_parallel import HostCopy

Waits = Callable[[], AbstractContextManager[Counter[str]]]


def test_a_copy_on_the_cpu_has_arrived_and_does_not_change() -> None:
    t = torch.arange(3.0, requires_grad=True)
    copy = HostCopy(t)
    with torch.no_grad():
        t.zero_()
    assert copy.arrived
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
    assert not copy.read().requires_grad


def test_a_copy_in_progress_is_waited_for_once() -> None:
    waits: list[str] = []
    copy = HostCopy(torch.ones(2))
    copy._event = SimpleNamespace(  # type: ignore[assignment]
        query=lambda: False, synchronize=lambda: waits.append("event")
    )
    assert not copy.arrived
    assert copy.read().tolist() == copy.read().tolist() == [1.0, 1.0]
    assert copy.arrived and waits == ["event"]


@pytest.mark.gpu
def test_a_value_read_later_is_not_waited_for(device: torch.device, device_waits: Waits) -> None:
    t = torch.ones(3, device=device)
    with device_waits() as waits:
        copy = HostCopy(t)
        t.zero_()
        while not copy.arrived:
            t.add_(1)
        values = copy.read()
    assert waits == Counter()
    assert values.device.type == "cpu" and values.tolist() == [1.0] * 3


@pytest.mark.gpu(real="memory is not pinned")
def test_the_memory_is_pinned(device: torch.device) -> None:
    assert HostCopy(torch.ones(3, device=device)).read().is_pinned()
