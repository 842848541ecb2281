"""A failed test is named when it fails, with one process and with several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLING = Path(__file__).parents[1]
TESTS = """
import pytest


@pytest.fixture
def broken():
    raise OSError("no\\nsuch thing")


def test_one():
    assert 1 + 1 == 3


def test_two(broken):
    pass


def test_three():
    print("passed")
"""


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one", "two"])
def test_failures_are_named_before_the_summary(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "early_failures", *processes, "test_it.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOLING), "PYTEST_ADDOPTS": ""},
    )
    early = done.stdout.partition("= ERRORS")[0]
    assert "FAILED test_it.py::test_one: assert (1 + 1) == 3\n" in early, done.stdout + done.stderr
    assert "FAILED test_it.py::test_two: OSError: no such thing\n" in early
    assert "test_three" not in early
