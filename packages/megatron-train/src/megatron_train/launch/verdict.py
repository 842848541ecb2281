"""Of everything that ranks say when one of them fails: the one line that a person needs.

A rank that failed by itself is the cause, and the first of those is named. Where nobody did, a rank
is missing: dead by a signal, frozen, or elsewhere in the program. Then the words of a rank that
missed it are quoted, since they hold the axis and the operation.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_train.launch.link import Report

_STOPS = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_MISSED = re.compile(
    r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?: \(stage \d+ of \d+\)| of \d+)?,? "
    r"(?:did not|gave no sign|gave up|is gone|raised|which keeps)"
)
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$", re.MULTILINE)
_STACKS = ("Traceback (most recent call last)", "Fatal Python error")


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    Attributes:
        rank: Which.
        status: Exit status, or minus the number of the signal that ended it.
        report: What it said about it.
        errors: The end of its standard error.
        killed: Its parent ended it, because another rank had failed.
        frozen: It was stopped by a signal at that time.
    """

    rank: int
    status: int
    report: Report | None = None
    errors: str = ""
    killed: bool = False
    frozen: bool = False

    @property
    def orderly(self) -> bool:
        """Whether the rank came to its end, or to the end of its step after a signal."""
        return self.report is None and (self.status == 0 or self.status in _STOPS)


@dataclass(frozen=True)
class Verdict:
    """What a launch comes to.

    Attributes:
        status: Exit status of the whole.
        line: What went wrong, without the program's name; empty where nothing did.
        detail: What belongs above the line: tracebacks and last words.
        interrupted: Somebody wanted the end; there is no error.
        port_taken: The ranks may be started again with another port.
    """

    status: int
    line: str = ""
    detail: str = ""
    interrupted: bool = False
    port_taken: bool = False


def judge(endings: Sequence[Ending], signals: Sequence[int] = ()) -> Verdict:
    """Returns what ``endings``, the first one first, come to.

    ``signals`` are those that were passed on to the ranks.
    """
    causes = [ending for ending in endings if _is_cause(ending, signals)]
    if causes:
        return _of_cause(causes, endings)
    stops = [ending for ending in endings if ending.status in _STOPS]
    if signals and not all(ending.orderly for ending in endings):
        return Verdict(128 + signals[-1], interrupted=True)
    if any(ending.report and ending.report.kind == "interrupted" for ending in endings):
        return Verdict(stops[0].status if stops else _STOPS[0], interrupted=True)
    absent = [ending for ending in endings if ending.killed and ending.report is None]
    witness = _witness(endings, absent)
    if witness is not None:
        named = _missed(witness)
        frozen = [ending.rank for ending in absent if ending.frozen]
        absentees = frozen or [ending.rank for ending in absent]
        words = ""
        if frozen:
            words = f"{in_words(frozen)} {'are' if frozen[1:] else 'is'} frozen (SIGSTOP); "
        elif absentees and not named:
            words = f"{in_words(absentees)} did not answer; "
        return Verdict(1, words + _quote(witness))
    if absent:
        ranks = in_words([ending.rank for ending in absent])
        return Verdict(1, f"{ranks} did not end after the others had: frozen or in a deadlock")
    return Verdict(stops[0].status if stops else 0)


def _is_cause(ending: Ending, signals: Sequence[int]) -> bool:
    """Returns whether the rank failed by itself."""
    if ending.report is not None:
        return ending.report.kind in ("own", "bug", "port") and not _missed(ending)
    if ending.killed or ending.orderly:
        return False
    return -ending.status not in signals


def _of_cause(causes: Sequence[Ending], endings: Sequence[Ending]) -> Verdict:
    # A rank that only passes on another's error is not the one to quote.
    quoting = [e for e in causes if e.report and re.match(r"rank \d+: ", e.report.message)]
    causes = [ending for ending in causes if ending not in quoting] or causes
    first = causes[0]
    report = first.report
    if report is None and first.status < 0:
        return _of_death([ending for ending in causes if ending.status == first.status], endings)
    if report is None:
        last = " ".join(first.errors.strip().rpartition("\n")[2].split())
        words = f": {last}" if last else " without a word"
        line = f"rank {first.rank} ended with status {first.status}{words}"
        return Verdict(first.status, line, _marked(first))
    alike = [e.rank for e in causes if e.report and e.report.message == report.message]
    everybody = len(alike) == len(endings) > 1
    line = report.message if everybody else f"{in_words(alike)}: {report.message}"
    if report.kind == "bug":
        line += " (a bug; its traceback is above)"
    taken = report.kind == "port"
    return Verdict(report.status, line, report.traceback, port_taken=taken)


def _of_death(dead: Sequence[Ending], endings: Sequence[Ending]) -> Verdict:
    """Some ranks ended by the same signal, which others may have noticed."""
    first = dead[0]
    number = -first.status
    found = _WHAT.search(first.errors)
    why = f" ({found[1].strip()})" if found else ""
    if number == signal.SIGKILL:
        why = " (as the system does when memory runs out)"
    ranks = in_words([ending.rank for ending in dead])
    verb = "were" if dead[1:] else "was"
    line = f"{ranks} {verb} killed by {signal.Signals(number).name}{why}"
    witness = _witness(endings, dead)
    if witness is not None:
        line += f"; {_quote(witness)}"
    shown = _marked(first) if any(mark in first.errors for mark in _STACKS) else ""
    return Verdict(128 + number, line, shown)


def _witness(endings: Sequence[Ending], culprits: Sequence[Ending]) -> Ending | None:
    """The rank that says best whom it missed: a culprit, frozen ones first, and on which axis."""
    frozen = {ending.rank for ending in culprits if ending.frozen}
    ranks = {ending.rank for ending in culprits}

    def worth(ending: Ending) -> tuple[bool, bool, bool, bool]:
        named = _missed(ending)
        text = ending.report.message if ending.report else ""
        return bool(named & frozen), bool(named & ranks), "axis" in text, bool(named)

    witnesses = [
        ending
        for ending in endings
        if ending.report and (ending.report.kind == "peer" or _missed(ending))
    ]
    return max(witnesses, key=worth, default=None)  # of equals the first


def _missed(ending: Ending) -> set[int]:
    """Returns the ranks that a rank says it missed."""
    if ending.report is None or ending.report.kind not in ("own", "peer"):
        return set()
    ranks = set[int]()
    for match in _MISSED.finditer(ending.report.message):
        for span in match[1].split(", "):
            first, _, last = span.partition("-")
            ranks.update(range(int(first), int(last or first) + 1))
    return ranks - {ending.rank}


def _quote(ending: Ending) -> str:
    """Returns what a rank said, and which rank that was."""
    message = ending.report.message if ending.report else ""
    name = f"rank {ending.rank}"
    return message if message.startswith(f"{name} ") else f"{name}: {message}"


def _marked(ending: Ending) -> str:
    lines = ending.errors.rstrip().splitlines()
    return "".join(f"[rank {ending.rank}] {line}\n" for line in lines)


def in_words(ranks: Sequence[int]) -> str:
    """Returns ranks as they are written in a sentence: ``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
