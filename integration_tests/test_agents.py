"""The commands of AGENTS.md run, and the paths that it names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, Command, commands

PAGE = ROOT / "AGENTS.md"
LINES = 90
"""The page has to stay short."""

NOT_HERE = ("python3 -m venv", ".venv/bin/pip", "nox -s", "ruff ", "python tooling/check_words.py")
"""Starts of commands that install or run everything: nox itself runs them."""


def runs_here(command: Command) -> bool:
    return not command.text.startswith(NOT_HERE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "command", [one for one in commands(PAGE) if runs_here(one)], ids=lambda one: one.text
)
def test_a_command_runs(command: Command) -> None:
    """Runs a command; one of pytest finds its tests, which other sessions run."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTEST_ADDOPTS": "--collect-only"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command.location}: {done.stdout}{done.stderr}"


def test_sessions_and_files_of_the_other_commands_exist() -> None:
    sessions = re.findall(
        r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), flags=re.MULTILINE
    )
    others = [command.text for command in commands(PAGE) if not runs_here(command)]
    assert len(others) >= len(NOT_HERE)
    for text in others:
        for session in re.findall(r"nox -s (\w+)", text):
            assert session in sessions, text
        for file in re.findall(r"-[rc] (\S+)", text):
            assert (ROOT / file).is_file(), text


def test_named_paths_exist_and_the_page_is_short() -> None:
    text = PAGE.read_text()
    paths = [name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or "." in name[1:]]
    paths = [name for name in paths if name not in (".bin/.idx", "__init__.pyi", ".venv")]
    assert len(paths) >= 15
    missing = [name for name in paths if not (ROOT / name).exists() and name != "CHANGELOG.md"]
    assert not missing
    assert len(text.splitlines()) <= LINES
