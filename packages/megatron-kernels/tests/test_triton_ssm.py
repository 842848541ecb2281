"""The Triton kernels of scan and convolution: interpreted, and compiled for an H100."""

from pathlib import Path

import pytest
from interpreted import needs_triton, run_interpreted, run_script

HERE = Path(__file__).parent


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scans_in_tritons_interpreter_equal_the_reference(sample: bool) -> None:
    run_interpreted(HERE / "triton_ssm.py", sample=sample)


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_convolutions_in_tritons_interpreter_equal_the_reference(sample: bool) -> None:
    run_interpreted(HERE / "triton_conv.py", sample=sample)


SIZES = """
import torch
from h100 import compile_only
from megatron_kernels import ssd_scan
from megatron_kernels.ops import triton_op

compiled = compile_only()
triton_op.interprets = lambda: True
x = torch.empty(256, 1, 8, WIDTH, dtype=torch.DTYPE, requires_grad=True)
b, c = (torch.empty(256, 1, 1, STATE, dtype=x.dtype, requires_grad=True) for _ in range(2))
dt, a = torch.empty(256, 1, 8, dtype=x.dtype), torch.empty(8)
found = ssd_scan(x, dt, a, b, c, a, a, backend="triton")
torch.autograd.grad(found.output, (x, b, c), torch.empty_like(x))
for kernel, binary in compiled:
    print(kernel.fn.__name__, binary.metadata.shared)
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
    printed = run_script(script, TRITON_CACHE_DIR=str(tmp_path))
    shared = dict(line.split() for line in printed.splitlines())
    assert len(shared) == 7
    assert max(map(int, shared.values())) <= 227 * 1024
