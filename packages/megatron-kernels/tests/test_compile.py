"""Operations add no graph breaks under torch.compile and return equal results.

Dynamo cannot trace functions under the annotation hook, so this runs in a process without it.
"""

import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import megatron_kernels as mk
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator

# In other dtypes the host reads how many rows an expert gets.
GROUPED = mk.grouped_matmul, mk.quantized_grouped_matmul, mk.quantized_grouped_gradient

def source(op):
    dtype = torch.bfloat16 if op in GROUPED else torch.float64
    return InputGenerator(dtype, torch.device("cpu"))

first = {case.op: case for case in reversed(CASES)}  # the plainest case of each operation
cases = [*first.values()] if SAMPLE else CASES
calls = [(case.op, case.arguments(source(case.op))) for case in cases]

def sorted_choices(experts):
    return mk.sort_by_expert(experts, 5)

experts = torch.tensor([[4, 0], [-1, 2], [2, 7]])
traced = torch.compile(sorted_choices, fullgraph=True, backend="aot_eager")(experts)
assert all(map(torch.equal, traced, sorted_choices(experts)))

def everything():
    return [op(*arguments) for op, arguments in calls]

traced = torch.compile(everything, fullgraph=True, backend="aot_eager")()
def parts(found):
    found = found if isinstance(found, tuple) else (found,)
    return [t.float() if t.dtype.itemsize == 1 else t for t in found]  # torch compares no FP8

def gradients(found, arguments):
    outputs = [t for t in parts(found) if t.requires_grad]
    leaves = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs or not leaves:
        return []
    total = sum(t.sin().sum() for t in outputs)
    grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)]

for case, ours, plain, (_, arguments) in zip(cases, traced, everything(), calls, strict=True):
    # Compiled code has the reference of dropout, and eager code its tiles. Compiled code gathers
    # blocks, whose tables eager code reads.
    differs = "dropout" in case.label or case.op is mk.paged_attention
    same = torch.allclose if differs else torch.equal
    assert all(map(same, parts(ours), parts(plain))), case.op.name
    for one, other in zip(gradients(ours, arguments), gradients(plain, arguments), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text: f"{case.op.name}: {text}")

# The state of an optional library is a constant of the trace, not a graph break.
from megatron_kernels.ops.optional import missing_library
refusing = mk.Backend("absent", lambda x: x, lambda x: missing_library("flash-attn"), "")
plain = mk.Backend("plain", lambda x: x + 1, lambda x: None, "")

@mk.op(refusing, plain)
def more(x, *, backend="auto"):
    return more.run(backend, x)

expected = torch.zeros(2) if missing_library("flash-attn") is None else torch.ones(2)
assert torch.equal(
    torch.compile(lambda x: more(x), fullgraph=True, backend="aot_eager")(torch.zeros(2)), expected
)
print("whole graphs")
"""


EAGER = """
import sys
import torch
from megatron_kernels.cases import CASES
from megatron_kernels.inputs import InputGenerator

for case in CASES:
    found = case.op(*case.arguments(InputGenerator(torch.float32, torch.device("cpu"))))
    first = found[0] if isinstance(found, tuple) else found
    if first.requires_grad:
        first.sum().backward()
print([name for name in sys.modules if name.startswith("torch._dynamo")])
"""


def test_eager_operations_do_not_import_the_compiler() -> None:
    """The import would take 3 to 4 seconds at every start."""
    done = subprocess.run(
        [sys.executable, "-c", EAGER], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_operation_compiles_to_one_graph_with_equal_results(sample: bool) -> None:
    script = SCRIPT.replace("SAMPLE", str(sample))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "whole graphs"


GENERATED = """
import torch
import megatron_kernels as mk

def layer(q, gain, ids, cos, sin):
    mask = mk.Mask(document_ids=ids).prepare(q.shape[0], q.shape[0], device=q.device)
    rotated = mk.rope(mk.rms_norm(q, gain, 1e-5), cos, sin)
    found = mk.attention(rotated, rotated, q, mask, mk.Scores(scale=0.4), backend="torch")
    return mk.swiglu(found.unflatten(-1, (2, -1)))

ids = torch.tensor([[0, 0, 1, 1, 1, -1]], dtype=torch.int32)
q, gain = torch.randn(6, 1, 2, 8, requires_grad=True), torch.rand(8, requires_grad=True)
tables = mk.rope_tables(torch.arange(6), mk.rope_frequencies(8))
found = [
    (y, *torch.autograd.grad(y.sin().sum(), (q, gain)))
    for y in (
        torch.compile(layer, fullgraph=True)(q, gain, ids, *tables),
        layer(q, gain, ids, *tables),
    )
]
for generated, eager in zip(*found, strict=True):
    torch.testing.assert_close(generated, eager)
print("equal")
"""

LOW_PRECISION = """
import torch
import megatron_kernels as mk

FLOOR = mk.QuantFormat("e4m3", 1, 32, "e8m0_floor")

def products(x, w, form):
    # Products of both passes read a matrix and its transpose: one loop over both orders.
    one, other = mk.quantize(x, form), mk.quantize(x.t(), form)
    return mk.dequantize(one, x.dtype) @ w, mk.dequantize(other, x.dtype) @ w.t()

for dtype in (torch.float32, torch.float64):
    for form in (mk.FP8_BLOCK, mk.FP8_BLOCK_2D, mk.MXFP8, FLOOR):
        x, w = torch.randn(64, 64, dtype=dtype), torch.randn(64, 64, dtype=dtype)
        torch.compiler.reset()
        generated = torch.compile(products, fullgraph=True)(x, w, form)
        torch.testing.assert_close(generated, products(x, w, form))
print("equal")
"""


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(GENERATED, id="several operations"),
        pytest.param(LOW_PRECISION, id="formats with blocks", marks=pytest.mark.slow),
    ],
)
def test_generated_code_gives_equal_numbers(script: str) -> None:
    """Traces alone are not what users run."""
    line = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
