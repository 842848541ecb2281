"""Samples of `nox -s device`: jobs on an imagined GPU, layouts on the simulated one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODULES = ("device", "device.four_ranks")


def run_sample(module, **environment):
    """Runs in a separate process, because torch looks for the device guard when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", module, "--sample"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize("module", MODULES)
def test_steps_on_a_device_are_as_in_the_table(module):
    done = run_sample(module)
    if done.stdout.startswith("DEVICE NOT CHECKED"):
        pytest.skip(done.stdout)  # no compiler, or a GPU: the line says which
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_compiler_is_reported_and_no_failure(module, tmp_path):
    done = run_sample(module, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    reasons = ["there is no C++ compiler"]
    if torch.version.cuda is not None:
        reasons.append("torch is built for CUDA; a simulated device needs one for CPUs")
    line = done.stdout
    assert any(line.startswith(f"DEVICE NOT CHECKED: {reason}") for reason in reasons), line
