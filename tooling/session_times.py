"""Times and results of nox sessions for the closing table, and what a run of many leaves out."""

import json
import subprocess
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


class SessionTimes:
    """The last time and result of each session, in a folder.

    Args:
        folder: Where to keep them.
        state: The state of the source that sessions test; empty if it has no name.
    """

    def __init__(self, folder: Path, state: str) -> None:
        self.folder = folder
        self.state = state

    def record(self, name: str, seconds: float, result: str) -> None:
        """Stores the time and result, `passed` or `failed`, of a session."""
        self.folder.mkdir(parents=True, exist_ok=True)
        row = {"seconds": seconds, "result": result, "state": self.state}
        (self.folder / f"{name}.json").write_text(json.dumps(row))

    def forget(self, names: Iterable[str]) -> None:
        """Removes what is stored of these sessions."""
        for name in names:
            (self.folder / f"{name}.json").unlink(missing_ok=True)

    def has_passed(self, name: str) -> bool:
        """Returns whether a session has passed with this state of the source."""
        row = self._row(name)
        return bool(self.state) and row.get("state") == self.state and row["result"] == "passed"

    def table(self, names: Iterable[str], beside: Collection[str], seconds: float) -> str:
        """Returns the minutes of each session and of all; parallel ones take less than their sum.

        Args:
            names: The sessions, of which those without a stored result are left out.
            beside: Those that ran in parallel with others.
            seconds: The time of all.
        """
        rows = {name: row for name in names if (row := self._row(name))}
        width = max(map(len, (*rows, "session")))
        lines = [f"{'session':<{width}}  minutes  result"]
        for name, row in rows.items():
            mark = " (beside others)" if name in beside else ""
            lines.append(f"{name:<{width}}  {row['seconds'] / 60:7.2f}  {row['result']}{mark}")
        wrong = sum(row["result"] != "passed" for row in rows.values())
        lines.append(f"{'all':<{width}}  {seconds / 60:7.2f}")
        return "\n".join([*lines, f"{len(rows) - wrong} passed, {wrong} failed"])

    def _row(self, name: str) -> dict[str, object]:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def take_part(words: Sequence[str], parts: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Returns the sessions of `--part N`, of all parts without it, and the other arguments.

    Raises:
        ValueError: There is no such part.
    """
    others = list(words)
    if "--part" not in others:
        return [name for part in parts for name in part], others
    at = others.index("--part")
    number = "".join(others[at + 1 : at + 2])
    del others[at : at + 2]
    if number not in map(str, range(1, len(parts) + 1)):
        raise ValueError(f"--part {number}: use a number from 1 to {len(parts)}")
    return list(parts[int(number) - 1]), others


def source_state(root: Path = ROOT) -> str:
    """Returns the commit that is checked out; empty if files differ from it, or without git."""

    def git(*words: str) -> str:
        line = ["git", "-C", str(root), *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    return "" if git("status", "--porcelain") else git("rev-parse", "HEAD").replace("unknown", "")
