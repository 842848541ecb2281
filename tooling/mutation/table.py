"""The tables: planted defects, the tests that caught them, and the reasons of survivors."""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from mutation.plan import Planted
from mutation.trial import BROKEN, SURVIVED, TIMED_OUT, Outcome

UNJUDGED = "not judged yet"
Row = tuple[Planted, Outcome]


def reasons(path: Path) -> dict[str, str]:
    """Returns the reasons of survivors by the key of the defect."""
    rows = tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", [])
    return {f"{row['source']}: {row['before']} -> {row['after']}": row["reason"] for row in rows}


def tables(
    areas: Mapping[str, Sequence[Row]], why: Mapping[str, str], left_out: Counter[str], of: int
) -> str:
    """Returns all tables as Markdown."""
    rows = [row for found in areas.values() for row in found]
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
    parts = [
        f"{len(rows)} defects of {of} possible ones; caught: {percent(rows):.1f} %. "
        f"Left out beforehand: {skipped}.\n",
        by_area(areas),
        "Survivors:\n",
        survivors(rows, why),
        "Every defect:\n",
        by_file(rows),
    ]
    return "\n".join(parts)


def percent(rows: Sequence[Row]) -> float:
    """Returns the percentage of caught defects."""
    return 100 * sum(outcome.seen for _, outcome in rows) / max(len(rows), 1)


def by_area(areas: Mapping[str, Sequence[Row]]) -> str:
    """Returns the table of caught defects by area."""
    lines = ["| code | files | planted | caught | of these timed out |", "|---|---|---|---|---|"]
    for area, rows in areas.items():
        files = len({planted.defect.source for planted, _ in rows})
        seen = sum(outcome.seen for _, outcome in rows)
        late = sum(outcome.result == TIMED_OUT for _, outcome in rows)
        lines.append(f"| {area} | {files} | {len(rows)} | {seen} | {late or ''} |")
    return "\n".join(lines) + "\n"


def survivors(rows: Sequence[Row], why: Mapping[str, str]) -> str:
    """Returns the table of defects that no test caught, with the reasons from `survivors.toml`."""
    lines = ["| file | line | becomes | why it stays |", "|---|---|---|---|"]
    for planted, outcome in rows:
        if outcome.result == SURVIVED:
            reason = why.get(planted.key, UNJUDGED)
            if reason == UNJUDGED or not outcome.tests:
                reason += f" ({outcome.by})"
            lines.append(f"| {file_name(planted)} | {cells(planted)} | {reason} |")
    return "\n".join(lines) + "\n"


def by_file(rows: Sequence[Row]) -> str:
    """Returns the table of all defects and the tests that caught them, by file."""
    lines = ["| file | line | becomes | caught by |", "|---|---|---|---|"]
    named = ""
    for planted, outcome in sorted(rows, key=lambda row: row[0].defect.source):
        name = file_name(planted)
        lines.append(f"| {name if name != named else ''} | {cells(planted)} | {catcher(outcome)} |")
        named = name
    return "\n".join(lines) + "\n"


def catcher(outcome: Outcome) -> str:
    """Returns the file and test that caught a defect, without parameters."""
    if outcome.result == SURVIVED:
        return "**nothing**"
    if outcome.result == TIMED_OUT:
        files = {PurePosixPath(name.partition("::")[0]).stem for name in outcome.by.split(", ")}
        return f"{', '.join(sorted(files))}: no end"
    if outcome.by.startswith(BROKEN):
        return f"{PurePosixPath(outcome.by).stem}, where pytest itself ends"
    path, _, test = outcome.by.partition("::")
    name = re.sub(r"\[.*", "", test)
    return f"{PurePosixPath(path).stem}: " + (f"`{name}`" if name else "its import")


def file_name(planted: Planted) -> str:
    """Returns the file without `packages/…/src`."""
    return f"`{planted.defect.source.partition('/src/')[2] or planted.defect.source}`"


def cells(planted: Planted) -> str:
    """Returns the line and its change as two cells."""
    before, after = planted.before, planted.after
    if planted.defect.operator == "DropStatement":
        return f"{code(before)} | dropped"
    old, new = changed_words(before, after)
    return f"{code(before)} | {code(old)} → {code(new)}"


def changed_words(before: str, after: str) -> tuple[str, str]:
    """Returns the words that differ, each side with the same word before and after."""
    old, new = re.findall(r"\w+|\s+|[^\w\s]+", before), re.findall(r"\w+|\s+|[^\w\s]+", after)
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    start, end = max(start - 2, 0), max(end - 2, 0)
    return tuple("".join(words[start : len(words) - end]).strip() for words in (old, new))  # type: ignore[return-value]


def code(text: str) -> str:
    """Returns a code span that fits into a table."""
    short = text if len(text) <= 100 else text[:97] + "…"
    return f"`{short.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if short else "nothing"
