"""One case in n of a sampled test runs without slow tests, all with them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest


@pytest.mark.sampled({number})
@pytest.mark.parametrize("case", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3, 4, 5])
def test_sampled(case):
    pass


@pytest.mark.sampled({number})
@pytest.mark.parametrize("case", [7, 8])
def test_other(case):
    pass


@pytest.mark.parametrize("case", [9])
def test_whole(case):
    pass
"""


def collected(folder: Path, number: object, marks: str) -> tuple[list[str], str]:
    """Returns the names of the collected cases, and what the command printed."""
    (folder / "test_it.py").write_text(TESTS.format(number=number))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", marks, "test_it.py"]
    options = ["-c", ROOT / "pyproject.toml", "--confcutdir", ROOT, "-p", "conftest"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tooling'}", "PATH": ""}
    done = subprocess.run(
        [*command, *options, "--rootdir", "."],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    names = [line.partition("[")[2][:-1] for line in done.stdout.splitlines() if "::" in line]
    return names, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "marks", "expected"),
    [
        (3, "not slow", "3 7 9"),  # the names of the tests begin at the third and the first case
        (2, "slow or not slow", "012345 78 9"),
    ],
)
def test_each_nth_case_that_is_not_slow_runs(
    tmp_path: Path, number: int, marks: str, expected: str
) -> None:
    names, printed = collected(tmp_path, number, marks)
    assert names == list(expected.replace(" ", "")), printed


def test_another_number_is_refused(tmp_path: Path) -> None:
    assert "sampled needs an integer of at least 2" in collected(tmp_path, 1, "slow")[1]
