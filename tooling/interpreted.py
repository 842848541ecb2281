"""Runs tests and code in processes of their own, where Triton interprets or compiles kernels.

Triton reads TRITON_INTERPRET when it is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(  # it is an extra of the package
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_interpreted(*scripts: Path, sample: bool) -> None:
    """Runs the tests of files up to the first that fails; raises an error unless all of them pass.

    Args:
        scripts: The files, which can import modules of the folder of the first.
        sample: Whether slow tests are left out.
    """
    chosen = ("-m", "not slow") if sample else ()
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *chosen, *map(str, scripts))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": _with(scripts[0].parent)},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = done.stdout.splitlines()[-1]
    assert " passed" in summary and "skipped" not in summary


def run_script(script: str, **environment: str) -> str:
    """Runs Python code, which can import modules of this folder; returns what it prints.

    Args:
        script: The code.
        environment: More variables of its environment.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": _with(Path(__file__).parent), **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _with(folder: Path) -> str:
    """Returns the folders from which modules are imported, with one before them."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
