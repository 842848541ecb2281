"""What a rank does in a step, as numbers that can be added and multiplied."""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megatron_parallel.imagined import DeviceLedger

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Counts:
    """What one rank does on its device in a step. Counters are by code line unless noted.

    Attributes:
        waits: How often the host waits for the device.
        blocking_copies: Copies from the host for which the host waits.
        copies: Other copies from the host.
        kernels: Kernels, by operation.
        bytes_moved: Bytes of inputs and outputs of kernels that are not matrix products or fused
            attention.
        flops: Floating-point operations of matrix products and attention.
        messages: Collectives and messages, by axis and operation.
        message_bytes: Their payload in bytes, by axis and operation (`megatron_parallel.Traffic`).
    """

    waits: Counter[str]
    blocking_copies: Counter[str]
    copies: Counter[str]
    kernels: Counter[str]
    bytes_moved: Counter[str]
    flops: int
    messages: Counter[tuple[str, str]]
    message_bytes: Counter[tuple[str, str]]

    @classmethod
    def of(
        cls,
        ledger: DeviceLedger,
        messages: Counter[tuple[str, str]],
        message_bytes: Counter[tuple[str, str]],
    ) -> "Counts":
        """Returns what was counted since the ledger was cleared, with these messages."""
        return cls(
            waits=ledger.waits.copy(),
            blocking_copies=ledger.blocking_copies.copy(),
            copies=ledger.copies.copy(),
            kernels=ledger.kernels.copy(),
            bytes_moved=ledger.bytes_moved.copy(),
            flops=ledger.flops,
            messages=messages,
            message_bytes=message_bytes,
        )

    def extrapolated(self, longer: "Counts", times: int) -> "Counts":
        """Returns these counts plus ``times`` the difference of ``longer`` from them."""
        return Counts(
            waits=_extrapolated(self.waits, longer.waits, times),
            blocking_copies=_extrapolated(self.blocking_copies, longer.blocking_copies, times),
            copies=_extrapolated(self.copies, longer.copies, times),
            kernels=_extrapolated(self.kernels, longer.kernels, times),
            bytes_moved=_extrapolated(self.bytes_moved, longer.bytes_moved, times),
            flops=self.flops + times * (longer.flops - self.flops),
            messages=_extrapolated(self.messages, longer.messages, times),
            message_bytes=_extrapolated(self.message_bytes, longer.message_bytes, times),
        )


@dataclass(frozen=True)
class RankUse:
    """Memory and work of one rank.

    Attributes:
        rank: The rank.
        pipeline_rank: Its coordinate on the axis ``pp``.
        stages: Its pipeline stages.
        layers: The number of its layers.
        micro_batches: Micro-batches of a step.
        run_micro_batches: Micro-batches of the step whose memory is given.
        memory: Bytes that are allocated between steps, by part.
        peak: Largest number of bytes in a step.
        at_peak: Bytes that are allocated then, by part and code line.
        counts: What it does in a step.
        seconds: Duration of the dry run.
    """

    rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    layers: int
    micro_batches: int
    run_micro_batches: int
    memory: Mapping[str, int]
    peak: int
    at_peak: Mapping[tuple[str, str], int]
    counts: Counts
    seconds: float


def _extrapolated(short: Counter[Key], longer: Counter[Key], times: int) -> Counter[Key]:
    keys = dict.fromkeys((*short, *longer))
    return Counter({key: short[key] + times * (longer[key] - short[key]) for key in keys})
