"""Of everything that ranks say when one of them fails: the one line that a person needs.

A rank that failed by itself is the cause, and the first of those is named. Where nobody did, a rank
is missing: dead by a signal, suspended, or elsewhere in the program. Then the words of a rank that
missed it are quoted, since they hold the axis and the operation.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_train.launch.link import FailureReport

_STOPS = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_MISSED = re.compile(
    r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?: \(stage \d+ of \d+\)| of \d+)?,? "
    r"(?:did not|gave no sign|gave up|is gone|raised|which keeps)"
)
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$", re.MULTILINE)
_STACKS = ("Traceback (most recent call last)", "Fatal Python error")


@dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank: Which.
        status: Exit status, or minus the number of the signal that ended it.
        report: What it said about it.
        errors: The end of its standard error.
        killed: Its parent ended it, because another rank had failed.
        suspended: It was stopped by a signal at that time.
    """

    rank: int
    status: int
    report: FailureReport | None = None
    errors: str = ""
    killed: bool = False
    suspended: bool = False

    @property
    def clean(self) -> bool:
        """Whether the rank came to its end, or to the end of its step after a signal."""
        return self.report is None and (self.status == 0 or self.status in _STOPS)


@dataclass(frozen=True)
class LaunchOutcome:
    """What a launch comes to.

    Attributes:
        status: Exit status of the whole.
        message: What went wrong, without the program's name; empty where nothing did.
        details: What belongs above the line: tracebacks and last words.
        interrupted: Somebody wanted the end; there is no error.
        port_taken: The ranks may be started again with another port.
    """

    status: int
    message: str = ""
    details: str = ""
    interrupted: bool = False
    port_taken: bool = False


def launch_outcome(exits: Sequence[RankExit], signals: Sequence[int] = ()) -> LaunchOutcome:
    """Returns what ``exits``, the first one first, come to.

    ``signals`` are those that were passed on to the ranks.
    """
    causes = [rank_exit for rank_exit in exits if _is_cause(rank_exit, signals)]
    if causes:
        return _of_cause(causes, exits)
    stops = [rank_exit for rank_exit in exits if rank_exit.status in _STOPS]
    if signals and not all(rank_exit.clean for rank_exit in exits):
        return LaunchOutcome(128 + signals[-1], interrupted=True)
    if any(rank_exit.report and rank_exit.report.kind == "interrupted" for rank_exit in exits):
        return LaunchOutcome(stops[0].status if stops else _STOPS[0], interrupted=True)
    absent = [rank_exit for rank_exit in exits if rank_exit.killed and rank_exit.report is None]
    witness = _witness(exits, absent)
    if witness is not None:
        named = _missed(witness)
        suspended = [rank_exit.rank for rank_exit in absent if rank_exit.suspended]
        absentees = suspended or [rank_exit.rank for rank_exit in absent]
        words = ""
        if suspended:
            verb = "are" if suspended[1:] else "is"
            words = f"{format_ranks(suspended)} {verb} suspended (SIGSTOP); "
        elif absentees and not named:
            words = f"{format_ranks(absentees)} did not answer; "
        return LaunchOutcome(1, words + _quote(witness))
    if absent:
        ranks = format_ranks([rank_exit.rank for rank_exit in absent])
        return LaunchOutcome(
            1, f"{ranks} did not end after the others had: suspended or in a deadlock"
        )
    return LaunchOutcome(stops[0].status if stops else 0)


def _is_cause(rank_exit: RankExit, signals: Sequence[int]) -> bool:
    """Returns whether the rank failed by itself."""
    if rank_exit.report is not None:
        return rank_exit.report.kind in ("own", "bug", "port") and not _missed(rank_exit)
    if rank_exit.killed or rank_exit.clean:
        return False
    return -rank_exit.status not in signals


def _of_cause(causes: Sequence[RankExit], exits: Sequence[RankExit]) -> LaunchOutcome:
    # A rank that only passes on another's error is not the one to quote.
    quoting = [e for e in causes if e.report and re.match(r"rank \d+: ", e.report.message)]
    causes = [rank_exit for rank_exit in causes if rank_exit not in quoting] or causes
    first = causes[0]
    report = first.report
    if report is None and first.status < 0:
        return _of_death(
            [rank_exit for rank_exit in causes if rank_exit.status == first.status], exits
        )
    if report is None:
        last = " ".join(first.errors.strip().rpartition("\n")[2].split())
        words = f": {last}" if last else " without a word"
        line = f"rank {first.rank} ended with status {first.status}{words}"
        return LaunchOutcome(first.status, line, _marked(first))
    alike = [e.rank for e in causes if e.report and e.report.message == report.message]
    every_rank = len(alike) == len(exits) > 1
    line = report.message if every_rank else f"{format_ranks(alike)}: {report.message}"
    if report.kind == "bug":
        line += " (a bug; its traceback is above)"
    taken = report.kind == "port"
    return LaunchOutcome(report.status, line, report.traceback, port_taken=taken)


def _of_death(dead: Sequence[RankExit], exits: Sequence[RankExit]) -> LaunchOutcome:
    """Some ranks ended by the same signal, which others may have noticed."""
    first = dead[0]
    number = -first.status
    found = _WHAT.search(first.errors)
    why = f" ({found[1].strip()})" if found else ""
    if number == signal.SIGKILL:
        why = " (as the system does when memory runs out)"
    ranks = format_ranks([rank_exit.rank for rank_exit in dead])
    verb = "were" if dead[1:] else "was"
    line = f"{ranks} {verb} killed by {signal.Signals(number).name}{why}"
    witness = _witness(exits, dead)
    if witness is not None:
        line += f"; {_quote(witness)}"
    shown = _marked(first) if any(mark in first.errors for mark in _STACKS) else ""
    return LaunchOutcome(128 + number, line, shown)


def _witness(exits: Sequence[RankExit], culprits: Sequence[RankExit]) -> RankExit | None:
    """Returns the rank whose report names the missing ranks best.

    A report that names a suspended rank comes first, then one that names a culprit, then one that
    names an axis.
    """
    suspended = {rank_exit.rank for rank_exit in culprits if rank_exit.suspended}
    ranks = {rank_exit.rank for rank_exit in culprits}

    def worth(rank_exit: RankExit) -> tuple[bool, bool, bool, bool]:
        named = _missed(rank_exit)
        text = rank_exit.report.message if rank_exit.report else ""
        return bool(named & suspended), bool(named & ranks), "axis" in text, bool(named)

    witnesses = [
        rank_exit
        for rank_exit in exits
        if rank_exit.report and (rank_exit.report.kind == "peer" or _missed(rank_exit))
    ]
    return max(witnesses, key=worth, default=None)  # of equals the first


def _missed(rank_exit: RankExit) -> set[int]:
    """Returns the ranks that a rank says it missed."""
    if rank_exit.report is None or rank_exit.report.kind not in ("own", "peer"):
        return set()
    ranks = set[int]()
    for match in _MISSED.finditer(rank_exit.report.message):
        for span in match[1].split(", "):
            first, _, last = span.partition("-")
            ranks.update(range(int(first), int(last or first) + 1))
    return ranks - {rank_exit.rank}


def _quote(rank_exit: RankExit) -> str:
    """Returns what a rank said, and which rank that was."""
    message = rank_exit.report.message if rank_exit.report else ""
    name = f"rank {rank_exit.rank}"
    return message if message.startswith(f"{name} ") else f"{name}: {message}"


def _marked(rank_exit: RankExit) -> str:
    lines = rank_exit.errors.rstrip().splitlines()
    return "".join(f"[rank {rank_exit.rank}] {line}\n" for line in lines)


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as they are written in a sentence: ``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
