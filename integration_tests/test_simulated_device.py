"""A sample of the tests for one GPU, on the simulated device: `nox -s simulated` runs all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE = (
    "refused or waits_for_the_device or (losses_and_gradients and (dropout or shared)) "
    "or waits_once or (elsewhere and float32) "
    "or (runs_with_offloaded_state and half and bf16)"
)
FILES = ["integration_tests/gpu/test_training_step.py", "integration_tests/gpu/test_offload.py"]


def test_steps_on_the_simulated_device_and_a_planted_host_tensor():
    """Runs in a separate process, because torch detects devices only when it is imported."""
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--device", "simulated", "-rs"]
    line += ["-p", "no:cacheprovider", *FILES, "-k", SAMPLE]
    done = subprocess.run(
        line,
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if missing := re.search("no simulated device: .*", done.stdout):
        pytest.skip(missing[0])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"^15 passed, \d+ deselected", done.stdout, re.MULTILINE), done.stdout[-500:]
