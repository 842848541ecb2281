"""Layouts of four ranks with offloaded state, on the simulated device, against the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "title",
    [
        "dp4(2x2)·sharded-tied-dropout",
        pytest.param("tp2·sp·dp2·fsdp-untied", marks=SLOW),
        pytest.param("dp4·gathered·ep2·a2a-moe", marks=SLOW),
    ],
)
def test_offloaded_state_gives_the_weights_of_the_cpu(title):
    """Runs in a separate process, because torch detects devices only when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "layouts.offloaded", title],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "tooling", "OMP_NUM_THREADS": "1"},
    )
    if "NOT SIMULATED" in done.stdout:
        pytest.skip(done.stdout)  # no compiler, or a GPU: the line says which
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^difference (\S+), offloaded (\S+), waits (\d+)$", done.stdout, re.M)
    assert len(found) == 4, done.stdout
    for difference, offloaded, waits in found:
        assert float(difference) < 1e-12 and 0.5 < float(offloaded) <= 0.6 and waits == "3"
