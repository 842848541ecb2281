"""Adam's Triton kernel, without a GPU: interpreted, compiled for an H100, imagined and refused."""

import math
import sys
from pathlib import Path

import pytest
import torch
from interpreted import needs_triton, run_interpreted, run_script
from megatron_optim import AdamSettings, OptimError, Optimizer, OptimizerConfig, UnreadStep
from megatron_optim.address_tables import ALIGNED, ALIGNMENT, CHUNK, AddressTables, Tables
from megatron_optim.multi_tensor import load_kernel
from megatron_optim.triton_adam import TritonAdam
from megatron_parallel import Mesh, Sharding, TrainableParameters
from megatron_parallel.imagined import imagined_device
from torch.nn import Parameter

HERE = Path(__file__).parent


@needs_triton
@pytest.mark.parametrize("sample", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["triton_adam.py", "triton_adam_in_optimizer.py"])
def test_the_kernel_in_tritons_interpreter_equals_torch(script: str, sample: bool) -> None:
    run_interpreted(HERE / script, sample=sample)


BINARIES = """
import torch
from h100 import compile_only
from megatron_optim import UnreadStep
from megatron_optim.triton_adam import TritonAdam

compiled = compile_only()
kernel, one = TritonAdam.load(), torch.ones(())
for dtype in (None, torch.bfloat16, torch.float16):
    for decoupled, divisor in ((True, one), (False, None)):
        rounded = [] if dtype is None else [torch.ones(5, dtype=dtype)]
        kernel.update_unread(
            [[torch.ones(5)] for _ in range(4)],
            lr=1e-2, betas=(0.9, 0.999), eps=1e-8, decoupled=decoupled, weight_decay=0.1,
            step=UnreadStep(one, one, divisor, rounded),
        )
        binary = compiled[-1][1]
        code = binary.asm
        assert code["cubin"]
        # Aligned blocks: 16 bytes of fp32 and 8 of half precision at a time, in one layout.
        assert code["ptx"].count("ld.global.v4.b32") >= 4
        assert "st.global.v4.b32" in code["ptx"]
        assert ("st.global.v2.b32" in code["ptx"]) == (dtype is not None)
        assert binary.metadata.shared == 0
print(len(compiled))
"""


@needs_triton
def test_the_kernel_compiles_for_an_h100_with_long_loads_and_stores(tmp_path: Path) -> None:
    assert run_script(BINARIES, TRITON_CACHE_DIR=str(tmp_path)).strip() == "6"


def test_nothing_imports_triton_before_it_is_asked_for() -> None:
    run_script(
        "import sys, megatron_optim.rules, megatron_optim.triton_adam\n"
        "assert 'triton' not in sys.modules\n"
    )


def test_a_missing_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_optim.adam_kernel", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    message = "kernels is triton, which has no multi-tensor kernels here: .*; install it, or use"
    with pytest.raises(OptimError, match=message) as caught:
        load_kernel("triton")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(3, 2), "runs on CUDA devices, but parameter 'weight' is updated on a CPU"),
        (torch.ones(3, 2).double(), "computes in fp32, but parameter 'weight' is float64"),
        (torch.ones(2, 3).T, "updates contiguous tensors, but parameter 'weight' is not"),
    ],
)
def test_parameters_that_the_kernel_cannot_update_are_refused(
    tensor: torch.Tensor, reason: str
) -> None:
    parameters = {"weight": Parameter(tensor)}
    trainable = TrainableParameters(parameters, {"weight": Sharding((3, 2))}, Mesh.single())
    config = OptimizerConfig(settings=AdamSettings(kernels="triton"))
    with pytest.raises(OptimError, match=f"kernels is triton, which {reason}.*; use torch"):
        Optimizer(trainable, config)


def test_tables_list_tensors_and_chunks() -> None:
    tensors = [torch.zeros(size) for size in (3, 0, 2 * CHUNK + 1, CHUNK)]
    shifted = torch.zeros(4)[1:]
    rounded = [None, None, tensors[2].bfloat16(), tensors[3].half()]
    made = AddressTables()
    tables = made.of([[shifted, *tensors[1:]], tensors, tensors, tensors], rounded)
    assert tables.tensors[0].tolist() == [shifted.data_ptr(), *[tensors[0].data_ptr()] * 3, 0, 3, 0]
    assert tables.tensors[:, 5].tolist() == [3, 0, 2 * CHUNK + 1, CHUNK]
    assert all(tensors[number].data_ptr() % ALIGNMENT == 0 for number in (2, 3))
    assert tables.tensors[2:, 6].tolist() == [1 + ALIGNED, 2 + ALIGNED]
    assert tables.chunks.tolist() == [[0, 0], [2, 0], [2, 1], [2, 2], [3, 0]]
    for number in range(100):  # other tensors in each call, as copies are
        made.of([[tensors[3][number:]]] * 4, [])
    assert len(made._tensors) == 32


def test_tensors_are_aligned_if_all_their_addresses_are_multiples_of_16_bytes() -> None:
    """The kernel loads and stores as many bytes at once, in each of the chunks."""
    whole, half = torch.zeros(32), torch.zeros(32, dtype=torch.bfloat16)
    assert whole.data_ptr() % 64 == half.data_ptr() % 64 == 0
    assert CHUNK * half.itemsize % 16 == 0

    def form(first: int, first_rounded: int, dtype: torch.dtype = torch.bfloat16) -> int:
        lists = [[whole[:8]], [whole[first : first + 8]], [whole[:8]], [whole[:8]]]
        into = half.view(dtype)[first_rounded : first_rounded + 8]
        return int(AddressTables().of(lists, [into]).tensors[0, 6])

    assert [form(first, 0) for first in range(9)] == [5, 1, 1, 1, 5, 1, 1, 1, 5]
    assert [form(0, first) for first in range(9)] == [5, *[1] * 7, 5]
    assert (form(0, 0, torch.float16), form(1, 0, torch.float16)) == (6, 2)


def test_an_imagined_device_counts_one_kernel_and_its_bytes() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tensors without values have no addresses")

    kernel, numel = TritonAdam(refuse), 1000
    with imagined_device("cpu") as ledger:
        lists = [[torch.empty(numel)] for _ in range(4)]
        rounded = [torch.empty(numel, dtype=torch.bfloat16)]
        numbers = [torch.ones(()) for _ in range(3)]
        ledger.clear()
        kernel.update_unread(
            lists,
            lr=1e-2,
            betas=(0.9, 0.999),
            eps=1e-8,
            step=UnreadStep(*numbers, rounded),
            decoupled=True,
            weight_decay=0.1,
        )
    assert dict(ledger.kernels) == {"adam": 1}
    assert ledger.bytes_moved.total() == 30 * numel + 3 * 4
    assert not ledger.waits


def test_tables_of_tensors_that_were_used_lately_are_not_made_again() -> None:
    tensors = [torch.zeros(4) for _ in range(40)]
    made = AddressTables()

    def of(number: int) -> torch.Tensor:
        return made.of([[tensors[number]]] * 4, []).tensors

    first, second = of(0), of(1)
    assert of(0) is first  # and is now the latest one
    for number in range(2, 33):
        of(number)
    assert of(0) is first and of(1) is not second
    assert len({id(made.of([[each]] * 4, []).chunks) for each in tensors}) == 1  # of one size


def adam(kernel: TritonAdam, tensors: list[list[torch.Tensor]], **given: object) -> None:
    numbers = {"lr": 0.5, "betas": (0.0, 0.75), "eps": 1e-8, "weight_decay": 0.25}
    kernel.update(tensors, **{**numbers, "step": 3, "decoupled": True, **given})  # type: ignore[arg-type]


def test_nothing_is_launched_for_parameters_without_elements() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("there is nothing to update")

    adam(TritonAdam(refuse), [[], [], [], []])
    adam(TritonAdam(refuse), [[torch.zeros(0, 3)]] * 4)


@pytest.mark.parametrize(("decoupled", "decay"), [(True, 0.125), (False, 0.25)])
def test_the_kernel_gets_the_numbers_of_the_step(decoupled: bool, decay: float) -> None:
    calls = []

    def launch(tables: object, *numbers: torch.Tensor, **given: object) -> None:
        calls.append((numbers, given))

    adam(TritonAdam(launch), [[torch.zeros(0)], *[[torch.ones(2)]] * 3], decoupled=decoupled)
    (((number, skip, divisor), given),) = calls
    assert (float(number), float(skip), divisor) == (3.0, 0.0, None)
    assert given["lr"] == 0.5 and given["decay"] == decay and given["decoupled"] == decoupled
    assert given["logarithms"] == [-math.inf, math.log(0.75)]


def test_gradients_that_are_not_contiguous_are_copied() -> None:
    addresses = []

    def launch(tables: Tables, *_: object, **__: object) -> None:
        addresses.append(int(tables.tensors[0, 0]))

    plain, turned = torch.ones(2, 3), torch.ones(3, 2).T
    for gradient in (plain, turned):
        adam(TritonAdam(launch), [[gradient], *([torch.ones(2, 3)] for _ in range(3))])
    assert addresses[0] == plain.data_ptr() and addresses[1] != turned.data_ptr()


def test_autograd_notices_that_the_kernel_writes() -> None:
    """A kernel writes behind the back of torch, and a value that was saved is then wrong."""
    parameter = torch.ones(2, requires_grad=True)
    saved = parameter.square().sum()
    adam(TritonAdam(lambda *_, **__: None), [[torch.ones(2)] for _ in range(4)])
    with torch.no_grad():
        others = [[torch.ones(2)], [parameter], [torch.ones(2)], [torch.ones(2)]]
        adam(TritonAdam(lambda *_, **__: None), others)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
