"""The report of a dry run, as text and as plain values."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from megatron_parallel.imagined.storages import OTHER

from megatron_train.config.run import RunConfig
from megatron_train.dry_run.counts import RankUse
from megatron_train.dry_run.rank import GRADIENTS, OPTIMIZER, PARAMETERS

PARTS: Final = (PARAMETERS, GRADIENTS, OPTIMIZER, OTHER)
_GIB: Final = 1 << 30
_LINES: Final = 8


def parts_at_peak(use: RankUse) -> dict[str, int]:
    """Returns the bytes at the peak by part, in the order of `PARTS`."""
    held: Counter[str] = Counter()
    for (part, _), nbytes in use.at_peak.items():
        held[part] += nbytes
    return {part: held[part] for part in PARTS}


def format_report(
    run: RunConfig, uses: Sequence[RankUse], device: str, missing: str
) -> Iterator[str]:
    """Yields the lines of a report for people.

    Args:
        run: The run.
        uses: What its ranks use.
        device: The device that was imagined.
        missing: Why no CUDA device was imagined; empty if it was not asked for.
    """
    count = uses[0].micro_batches
    yield f"{run.layout.world_size:,} ranks: {run.layout}"
    yield (
        f"a step of {run.batch_sizes.last:,} samples: {count:,} micro-batch{'es' * (count != 1)} "
        f"of {run.training.micro_batch_size} x {run.data.seq_length:,} tokens on each rank"
    )
    if missing:
        yield f"counted as on a CPU, since no CUDA device could be imagined: {missing}"
    elif device == "cpu":
        yield "counted as on a CPU"
    yield ""
    yield from _table(uses)
    yield ""
    yield from _messages(uses)
    largest = max(uses, key=lambda use: use.peak)
    yield ""
    yield f"peak of rank {largest.rank}, {OTHER} by line"
    lines = {line: n for (part, line), n in largest.at_peak.items() if part == OTHER}
    for line, nbytes in sorted(lines.items(), key=lambda item: -item[1])[:_LINES]:
        yield f"  {_gib(nbytes)}  {line}"
    if waits := +sum((use.counts.waits for use in uses), Counter()):
        yield ""
        yield "waits for the device in a step, by line"
        for line in waits:
            yield f"  {max(use.counts.waits[line] for use in uses):>6,}  {line}"


def _table(uses: Sequence[RankUse]) -> Iterator[str]:
    rows: list[tuple[str, Callable[[RankUse], str]]] = [
        ("rank", lambda use: f"{use.rank:,}"),
        ("pipeline rank", lambda use: str(use.pipeline_rank)),
        ("layers", lambda use: str(use.layers)),
        ("memory at the peak", lambda use: _gib(use.peak)),
        *((f"  {part}", lambda use, part=part: _gib(parts_at_peak(use)[part])) for part in PARTS),
        ("memory between steps", lambda use: _gib(sum(use.memory.values()))),
        ("kernels of a step", lambda use: f"{use.counts.kernels.total():,}"),
        ("products and attention", lambda use: f"{use.counts.flops / 1e12:,.1f} TFLOP"),
        ("moved by other kernels", lambda use: _gib(use.counts.bytes_moved.total())),
        ("waits for the device", lambda use: f"{use.counts.waits.total():,}"),
        ("blocking copies", lambda use: f"{use.counts.blocking_copies.total():,}"),
        ("micro-batches run", lambda use: f"{use.run_micro_batches:,} of {use.micro_batches:,}"),
    ]
    cells = [(name, *(cell(use) for use in uses)) for name, cell in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(uses) + 1)]
    for name, *values in cells:
        numbers = (f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True))
        yield "  ".join((f"{name:<{widths[0]}}", *numbers))


def _messages(uses: Sequence[RankUse]) -> Iterator[str]:
    keys = dict.fromkeys(key for use in uses for key in use.counts.messages)
    head = ("axis", "message", *(f"rank {use.rank}: calls, GiB" for use in uses))
    rows = [
        (
            axis,
            operation,
            *(
                f"{use.counts.messages[axis, operation]:,} "
                f"{use.counts.message_bytes[axis, operation] / _GIB:>9,.3f}"
                for use in uses
            ),
        )
        for axis, operation in keys
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for axis, operation, *numbers in (head, *rows):
        cells = (f"{text:>{width}}" for text, width in zip(numbers, widths[2:], strict=True))
        yield "  ".join((f"{axis:<{widths[0]}}", f"{operation:<{widths[1]}}", *cells))


def to_dict(run: RunConfig, uses: Sequence[RankUse], device: str) -> dict[str, Any]:
    """Returns all numbers as plain JSON values; memory in bytes."""
    return {
        "layout": str(run.layout),
        "ranks": run.layout.world_size,
        "device": device,
        "of_ranks": [
            {
                **{k: v for k, v in asdict(use).items() if k not in ("counts", "at_peak")},
                "at_peak": [
                    {"part": part, "line": line, "bytes": nbytes}
                    for (part, line), nbytes in sorted(use.at_peak.items(), key=lambda x: -x[1])
                ],
                "waits": dict(use.counts.waits),
                "blocking_copies": dict(use.counts.blocking_copies),
                "copies": dict(use.counts.copies),
                "kernels": dict(use.counts.kernels),
                "bytes_moved": dict(use.counts.bytes_moved),
                "flops": use.counts.flops,
                "messages": [
                    {
                        "axis": axis,
                        "operation": operation,
                        "calls": calls,
                        "bytes": use.counts.message_bytes[axis, operation],
                    }
                    for (axis, operation), calls in use.counts.messages.items()
                ],
            }
            for use in uses
        ],
    }


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.2f} GiB"
