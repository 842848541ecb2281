"""Compiled steps on an H100, by the code that Inductor generates for one: kernels and their bytes.

The loop by hand of the benchmarks is the bound: ours must not start more kernels of libraries, nor
move more bytes with others. Runs in a process of its own, because torch looks for the device guard
when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNT = """
import json
from unittest.mock import patch

from compiled_code import count_step, shortened
from gpu_step import BY_LAYER, FP8, LLAMA, _flags
from megatron_kernels.ops.rope import rope

MODEL = LLAMA + _flags(2, 256, 4, 512, 1000, 256, 4)

def numbers(flags, **options):
    found = count_step(MODEL + flags, **options)
    return {
        "products": found.total(lambda code: code.products) + found.eager_products,
        "kernels": found.total(lambda code: code.kernels),
        "eager": found.eager_kernels.total(),
        "nbytes": found.nbytes,
    }

found = {
    "plain": numbers("", plain=True),
    "stage": numbers("--compile "),
    "layer": numbers(BY_LAYER),
    "fp8": numbers(BY_LAYER + FP8),
}
with patch.object(rope, "swapped", rope.joined):
    found["planted"] = numbers(BY_LAYER)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton here")
def test_compiled_steps_move_no_more_than_those_of_a_loop_by_hand():
    path = os.pathsep.join(str(ROOT / folder) for folder in ("tooling", "tooling/bench"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    if done.stdout.startswith("compiled_code: nothing is counted"):
        pytest.skip(done.stdout)  # no C++ compiler, or a GPU: the line says which
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    plain, planted = found.pop("plain"), found.pop("planted")
    layer, fp8 = found["layer"], found.pop("fp8")
    for name, ours in found.items():
        assert ours["products"] == plain["products"], name
        assert 0 < ours["kernels"] <= plain["kernels"], name
        assert 0 < ours["nbytes"] <= plain["nbytes"], name
    # A longer expression of the rotation has a kernel of its own in each layer.
    assert planted["kernels"] > layer["kernels"]
    assert planted["nbytes"] > layer["nbytes"]
    assert fp8["eager"] == layer["eager"]  # weights are converted by compiled code
