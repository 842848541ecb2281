"""Reduces the failure reports of all ranks to the one line that the user needs.

The cause is the first rank that failed by itself. If no rank did, a rank is missing: it was killed
by a signal, is suspended, or waits elsewhere in the program. In that case the line quotes a rank
that waited for the missing one, since its report names the axis and the operation.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_train.launch.link import FailureReport

_STOPS = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_MISSED = re.compile(
    r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?: \(stage \d+ of \d+\)| of \d+)?,? "
    r"(?:did not|gave up|is gone|raised|which keeps)"
)
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$", re.MULTILINE)
_STACKS = ("Traceback (most recent call last)", "Fatal Python error")


@dataclass(frozen=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank: Rank in the job.
        status: Exit status, or minus the number of the signal that ended the rank.
        report: Failure report of the rank, if it sent one.
        errors: End of the rank's standard error.
        killed: Whether the parent killed the rank because another rank had failed.
        suspended: Whether the rank was stopped by a signal (SIGSTOP) when it was killed.
    """

    rank: int
    status: int
    report: FailureReport | None = None
    errors: str = ""
    killed: bool = False
    suspended: bool = False

    @property
    def clean(self) -> bool:
        """Whether the rank finished, or stopped after its current step because of a signal."""
        return self.report is None and (self.status == 0 or self.status in _STOPS)

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended the rank."""
        return self.status < 0


@dataclass(frozen=True)
class LaunchOutcome:
    """The result of a launch.

    Attributes:
        status: Exit status of the launch.
        message: The error in one line without the program's name; empty if there is none.
        details: Tracebacks and last lines of output, to be printed above the message.
        interrupted: Whether the user ended the job with a signal, which is not an error.
        port_taken: Whether the ranks may be started again with another port.
    """

    status: int
    message: str = ""
    details: str = ""
    interrupted: bool = False
    port_taken: bool = False


def launch_outcome(exits: Sequence[RankExit], signals: Sequence[int] = ()) -> LaunchOutcome:
    """Returns the outcome of a launch.

    Args:
        exits: How each rank ended, in the order of their ends.
        signals: Numbers of the signals that were forwarded to the ranks.
    """
    causes = [rank_exit for rank_exit in exits if _is_cause(rank_exit, signals)]
    if causes:
        return _cause_outcome(causes, exits)
    stops = [rank_exit for rank_exit in exits if rank_exit.status in _STOPS]
    if signals and not all(rank_exit.clean for rank_exit in exits):
        return LaunchOutcome(128 + signals[-1], interrupted=True)
    if any(rank_exit.report and rank_exit.report.kind == "interrupted" for rank_exit in exits):
        return LaunchOutcome(stops[0].status if stops else _STOPS[0], interrupted=True)
    absent = [rank_exit for rank_exit in exits if rank_exit.killed and rank_exit.report is None]
    witness = _best_witness(exits, absent)
    if witness is not None:
        named = _missing_ranks(witness)
        suspended = [rank_exit.rank for rank_exit in absent if rank_exit.suspended]
        missing = suspended or [rank_exit.rank for rank_exit in absent]
        words = ""
        if suspended:
            verb = "are" if suspended[1:] else "is"
            words = f"{format_ranks(suspended)} {verb} suspended (SIGSTOP); "
        elif missing and not named:
            words = f"{format_ranks(missing)} did not answer; "
        return LaunchOutcome(1, words + _quote(witness))
    if absent:
        ranks = format_ranks([rank_exit.rank for rank_exit in absent])
        return LaunchOutcome(
            1, f"{ranks} did not end after the other ranks: suspended or deadlocked"
        )
    return LaunchOutcome(stops[0].status if stops else 0)


def _is_cause(rank_exit: RankExit, signals: Sequence[int]) -> bool:
    """Returns whether the rank failed by itself."""
    if rank_exit.report is not None:
        return rank_exit.report.kind in ("own", "bug", "port") and not _missing_ranks(rank_exit)
    if rank_exit.killed or rank_exit.clean:
        return False
    return -rank_exit.status not in signals


def _cause_outcome(causes: Sequence[RankExit], exits: Sequence[RankExit]) -> LaunchOutcome:
    # Prefer a rank with an error of its own to one that repeats the error of another rank.
    repeating = [e for e in causes if e.report and re.match(r"rank \d+: ", e.report.message)]
    causes = [rank_exit for rank_exit in causes if rank_exit not in repeating] or causes
    first = causes[0]
    report = first.report
    if report is None and first.by_signal:
        return _signal_outcome(
            [rank_exit for rank_exit in causes if rank_exit.status == first.status], exits
        )
    if report is None:
        last = " ".join(first.errors.strip().rpartition("\n")[2].split())
        words = f": {last}" if last else " and printed no error"
        line = f"rank {first.rank} ended with status {first.status}{words}"
        return LaunchOutcome(first.status, line, _prefixed_errors(first))
    same_error = [e.rank for e in causes if e.report and e.report.message == report.message]
    every_rank = len(same_error) == len(exits) > 1
    line = report.message if every_rank else f"{format_ranks(same_error)}: {report.message}"
    if report.kind == "bug":
        line += " (a bug; its traceback is above)"
    taken = report.kind == "port"
    return LaunchOutcome(report.status, line, report.traceback, port_taken=taken)


def _signal_outcome(killed: Sequence[RankExit], exits: Sequence[RankExit]) -> LaunchOutcome:
    """Returns the outcome if ranks were killed by a signal, with a report of a waiting rank."""
    first = killed[0]
    number = -first.status
    found = _WHAT.search(first.errors)
    why = f" ({found[1].strip()})" if found else ""
    if number == signal.SIGKILL:
        why = " (the system kills processes when memory runs out)"
    ranks = format_ranks([rank_exit.rank for rank_exit in killed])
    verb = "were" if killed[1:] else "was"
    line = f"{ranks} {verb} killed by {signal.Signals(number).name}{why}"
    witness = _best_witness(exits, killed)
    if witness is not None:
        line += f"; {_quote(witness)}"
    shown = _prefixed_errors(first) if any(mark in first.errors for mark in _STACKS) else ""
    return LaunchOutcome(128 + number, line, shown)


def _best_witness(exits: Sequence[RankExit], culprits: Sequence[RankExit]) -> RankExit | None:
    """Returns the rank whose report names the missing ranks best.

    A report that names a suspended rank comes first, then one that names a culprit, then one that
    names an axis.
    """
    suspended = {rank_exit.rank for rank_exit in culprits if rank_exit.suspended}
    ranks = {rank_exit.rank for rank_exit in culprits}

    def rating(rank_exit: RankExit) -> tuple[bool, bool, bool, bool]:
        named = _missing_ranks(rank_exit)
        text = rank_exit.report.message if rank_exit.report else ""
        return bool(named & suspended), bool(named & ranks), "axis" in text, bool(named)

    witnesses = [
        rank_exit
        for rank_exit in exits
        if rank_exit.report and (rank_exit.report.kind == "peer" or _missing_ranks(rank_exit))
    ]
    return max(witnesses, key=rating, default=None)  # the first of several equals


def _missing_ranks(rank_exit: RankExit) -> set[int]:
    """Returns the missing ranks that a rank's report names."""
    if rank_exit.report is None or rank_exit.report.kind not in ("own", "peer"):
        return set()
    ranks = set[int]()
    for match in _MISSED.finditer(rank_exit.report.message):
        for span in match[1].split(", "):
            first, _, last = span.partition("-")
            ranks.update(range(int(first), int(last or first) + 1))
    return ranks - {rank_exit.rank}


def _quote(rank_exit: RankExit) -> str:
    """Returns the message of a rank's report, prefixed with the rank."""
    message = rank_exit.report.message if rank_exit.report else ""
    name = f"rank {rank_exit.rank}"
    return message if message.startswith(f"{name} ") else f"{name}: {message}"


def _prefixed_errors(rank_exit: RankExit) -> str:
    lines = rank_exit.errors.rstrip().splitlines()
    return "".join(f"[rank {rank_exit.rank}] {line}\n" for line in lines)


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks as text for a message: ``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
