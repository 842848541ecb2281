"""Compares counts with formulas."""

from layouts.traffic.formulas import Totals, added, formula, scalars
from layouts.traffic.jobs import STEPS, Job


def table(results: dict[Job, list[Totals]]) -> tuple[str, list[str]]:
    """Returns the table of all layouts, and a line for each message unlike its formula."""
    lines = [
        "| layout | model | axis | operation | calls | formula | bytes | formula |",
        "|---|---|---|---|---|---|---|---|",
    ]
    failed = []
    for job, ranks in results.items():
        for rank, counted in enumerate(ranks):
            failed += [
                f"{job.title}, rank {rank}: {line}" for line in differences(job, rank, counted)
            ]
        lines += [f"| {job.name} | {job.model} | {line} |" for line in rows(job, ranks[0])]
    return "\n".join(lines) + "\n", failed


def differences(job: Job, rank: int, counted: Totals) -> list[str]:
    """Returns a line for each message of a rank that differs from its formula."""
    expected = added(formula(job, rank), STEPS)
    return [
        f"{operation} on axis {axis!r}: (calls, bytes) {counted.get((axis, operation), (0, 0))}, "
        f"by formula {expected.get((axis, operation), (0, 0))}"
        for axis, operation in dict.fromkeys([*expected, *counted])
        if counted.get((axis, operation)) != expected.get((axis, operation))
    ]


def rows(job: Job, counted: Totals) -> list[str]:
    """Returns the lines of a step of rank 0; messages of one number are added together."""
    expected = added(formula(job, 0))
    small = set(added(list(scalars(job.layout, job.losses))))
    shown = {key: (key[0], key[1]) for key in dict.fromkeys([*expected, *counted])}
    shown |= {key: ("", "numbers") for key in shown if key in small}
    found: dict[tuple[str, str], list[float]] = {}
    for key, line in shown.items():
        sums = found.setdefault(line, [0, 0, 0, 0])
        for place, value in enumerate(counted.get(key, (0, 0))):
            sums[2 * place] += value / STEPS
        for place, value in enumerate(expected.get(key, (0, 0))):
            sums[2 * place + 1] += value
    return [
        " | ".join(
            [*line, *(f"{number:,g}" if number % 1 else f"{int(number):,}" for number in sums)]
        )
        for line, sums in found.items()
    ]
