"""The Triton kernels of scan and convolution: interpreted, and compiled for an H100."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted import needs_triton, run_interpreted

HERE = Path(__file__).parent


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_in_tritons_interpreter_equal_the_reference(sample: bool) -> None:
    run_interpreted(HERE / "triton_ssm.py", sample=sample)


SIZES = """
import torch
from megatron_kernels import ssd_scan
from megatron_kernels.ops import triton_op
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class H100:  # what Triton asks of a driver to compile
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

driver.set_active(H100())

def compile_only(kernel, grid):
    def launch(*arguments, **options):
        found = kernel.warmup(*arguments, grid=grid, **options)
        print(kernel.fn.__name__, found.metadata.shared)
    return launch

JITFunction.__getitem__ = compile_only
triton_op.interprets = lambda: True
x = torch.empty(256, 1, 8, WIDTH, dtype=torch.DTYPE, requires_grad=True)
b, c = (torch.empty(256, 1, 1, STATE, dtype=x.dtype, requires_grad=True) for _ in range(2))
dt, a = torch.empty(256, 1, 8, dtype=x.dtype), torch.empty(8)
found = ssd_scan(x, dt, a, b, c, a, a, backend="triton")
torch.autograd.grad(found.output, (x, b, c), torch.empty_like(x))
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width", "state"),
    [
        ("bfloat16", 64, 128),
        ("bfloat16", 128, 256),
        ("float16", 64, 128),
        ("float32", 64, 128),
        ("float32", 128, 128),
    ],
)
def test_tiles_of_every_size_fit_into_the_shared_memory_of_an_h100(
    dtype: str, width: int, state: int, tmp_path: Path
) -> None:
    script = SIZES.replace("WIDTH", str(width)).replace("STATE", str(state)).replace("DTYPE", dtype)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shared = dict(line.split() for line in done.stdout.splitlines())
    assert len(shared) == 7
    assert max(map(int, shared.values())) <= 227 * 1024
