"""The Triton backends, without a GPU: interpreted, compiled for an H100, traced and imagined."""

import os
from pathlib import Path

import pytest
import torch
from interpreted import needs_triton, run_interpreted, run_script
from megatron_kernels import gelu, rms_norm

HERE = Path(__file__).parent


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_in_tritons_interpreter_equal_the_references(sample: bool) -> None:
    run_interpreted(HERE / "triton_interpreter.py", sample=sample)


@needs_triton
def test_kernels_of_rows_pages_and_casts_in_tritons_interpreter_equal_the_references() -> None:
    run_interpreted(HERE / "triton_rows.py", HERE / "triton_pages.py", sample=True)


COMPILED = """
import torch
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator

cases = [case for case in CASES if any(b.name == "triton" for b in case.op.backends)]
cases = list({case.op.name: case for case in reversed(cases)}.values())
cases = [case for case in cases if not case.op.name.startswith("rope")]  # slow to interpret
cases = cases[PART::3]
calls = [(c.op, c.arguments(InputGenerator(torch.float64, torch.device("cpu")))) for c in cases]

def everything():
    return [op(*arguments, backend="triton") for op, arguments in calls]

def parts(found):
    return found if isinstance(found, tuple) else (found,)

def gradients(results):
    outputs = [x for found in results for x in parts(found) if x.requires_grad]
    tensors = [x for _, given in calls for x in given if isinstance(x, torch.Tensor)]
    leaves = [x for x in tensors if x.requires_grad]
    return torch.autograd.grad(sum(x.sin().sum() for x in outputs), leaves)

traced = torch.compile(everything, fullgraph=True, backend="aot_eager")()
plain = everything()
for one, other in zip(traced, plain, strict=True):
    assert all(map(torch.equal, parts(one), parts(other)))
assert all(map(torch.allclose, gradients(traced), gradients(plain)))
print("whole graphs")
"""


@needs_triton
@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(3))
def test_compiled_code_has_whole_graphs_with_equal_results(part: int) -> None:
    script = COMPILED.replace("PART", str(part))
    assert run_script(script, TRITON_INTERPRET="1").strip() == "whole graphs"


FAKE = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator

def parts(found):
    return found if isinstance(found, tuple) else (found,)

def described(found):
    return [(x.shape, x.stride(), x.dtype) for x in found]

def run(case):
    arguments = case.arguments(InputGenerator(torch.bfloat16, torch.device("cpu")))
    outputs = parts(case.op(*arguments, backend="triton"))
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs = [x for x in outputs if x.requires_grad] or outputs
    ones = [torch.ones_like(x) for x in outputs]
    grads = torch.autograd.grad(outputs, leaves, ones) if leaves else ()
    return described(outputs) + described(grads)

cases = [case for case in CASES if any(b.name == "triton" for b in case.op.backends)]
cases = list({case.op.name: case for case in reversed(cases)}.values())
cases = [c for at, c in enumerate(cases) if at % 3 == PART or c.op.name == "rms_norm"]
with FakeTensorMode(allow_non_fake_inputs=True):
    without_values = [run(case) for case in cases]
assert "megatron_kernels.triton_kernels.norm" not in sys.modules
for case, fake in zip(cases, without_values, strict=True):
    assert run(case) == fake, (case.op.name, case.label)
assert "megatron_kernels.triton_kernels.norm" in sys.modules
print("same shapes")
"""


@needs_triton
@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(3))
def test_tensors_without_values_have_the_same_shapes_and_need_no_triton(part: int) -> None:
    script = FAKE.replace("PART", str(part))
    assert run_script(script, TRITON_INTERPRET="1").strip() == "same shapes"


BINARIES = """
import torch
from h100 import compile_only
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator
from megatron_kernels.ops import triton_op

compiled = compile_only()
triton_op.interprets = lambda: True
seen = set()
for case in CASES:
    names = [backend.name for backend in case.op.backends]
    if "triton" not in names or (SAMPLE and case.op.name in seen):
        continue
    seen.add(case.op.name)
    arguments = case.arguments(InputGenerator(torch.bfloat16, torch.device("cpu")))
    found = case.op(*arguments, backend="triton")
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs = [x for x in outputs if x.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
assert all(binary.asm["cubin"] for _, binary in compiled)
print(len(seen), len(compiled))
"""


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_an_h100(sample: bool, tmp_path: Path) -> None:
    script = BINARIES.replace("SAMPLE", str(sample))
    operations, binaries = map(int, run_script(script, TRITON_CACHE_DIR=str(tmp_path)).split())
    assert operations == 26 and binaries >= 2 * operations - 1


def test_calls_of_other_backends_do_not_import_triton() -> None:
    script = (
        "import sys, torch\n"
        "from megatron_kernels import rms_norm\n"
        "rms_norm(torch.ones(2, 3), None)\n"
        "assert 'triton' not in sys.modules\n"
    )
    run_script(script)


def test_a_tensor_that_is_not_on_cuda_is_refused() -> None:
    assert not os.environ.get("TRITON_INTERPRET")
    choice = gelu.explain(torch.ones(2), backend="triton")
    assert choice.backend is None and "needs a CUDA tensor, x is on cpu" in choice.reason
    assert rms_norm.explain(torch.ones(2, 3), None).backend == "torch"
