"""Which GPUs multiply what in few bits and by groups, asked with tensors that have no values."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron_kernels import FP8_TENSOR, Quantized, _compat
from megatron_kernels.ops.low_precision import matmul
from megatron_kernels.ops.moe import grouped_matmul as grouped
from megatron_kernels.ops.moe import quantized_grouped_matmul as quantized
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


@pytest.fixture(autouse=True)
def _without_values() -> Iterator[None]:
    with FakeTensorMode():
        yield


def of(*shape: int, dtype: torch.dtype = E4M3, device: str = "cuda") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def on_gpu(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    """Makes tensors count as those of a GPU, with values."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(_compat, "has_gpu", lambda: True)
    for each in (_compat, module):
        monkeypatch.setattr(each, "is_fake", lambda _: False, raising=False)


def experts(
    rows: int = 48, inputs: int = 32, outputs: int = 64, **options: Any
) -> tuple[Tensor, ...]:
    """Returns the operands of products of four experts."""
    x, weight = of(rows, inputs, **options), of(4, outputs, inputs, **options)
    scale = of(dtype=torch.float32)
    return x, scale, weight, scale, of(4, dtype=torch.int64)


REASONS = [quantized.fused_unsupported_reason, quantized.in_16_bits_unsupported_reason]


@pytest.mark.parametrize("reason", REASONS, ids=["scaled_grouped_mm", "grouped_mm"])
def test_products_of_experts_in_few_bits_have_rows_and_sizes_of_16(reason: Any) -> None:
    assert reason(*experts(), BF16) is None and reason(*experts(1, 16, 16), BF16) is None
    assert reason(*experts(), torch.float16) == "it returns bfloat16, not torch.float16"
    assert reason(*experts(rows=0), BF16) == "there are no rows"
    for sizes in ({"inputs": 24}, {"outputs": 24}):
        assert reason(*experts(**sizes), BF16) == "sizes must be multiples of 16, not 24"
    *operands, _ = experts()
    elsewhere = of(4, dtype=torch.int64, device="cpu")
    assert reason(*operands, elsewhere, BF16) == "the counts are on cpu"


def test_torchs_grouped_product_in_fp8_runs_on_hopper_alone_and_in_e4m3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = quantized.fused_unsupported_reason
    few, wide = experts(), experts(dtype=E5M2)
    for given in ((*wide[:2], *few[2:]), (*few[:2], *wide[2:])):
        assert reason(*given, BF16) == "it multiplies e4m3 alone, not torch.float8_e5m2"
    monkeypatch.setattr(_compat, "has_gpu", lambda: False)
    assert reason(*few, BF16) is None  # they have no values
    for capability in ((9, 0), (8, 9), (9, 1), (10, 0)):
        on_gpu(capability, monkeypatch, quantized)
        expected = "it runs on compute capability 9.0 alone" if capability != (9, 0) else None
        assert reason(*few, BF16) == expected
    monkeypatch.setattr(_compat, "has_gpu", lambda: False)
    assert reason(*few, BF16) == "the driver finds no GPU"


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_grouped_products_in_16_bits_need_compute_capability_8(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(capability, monkeypatch, quantized)
    found = (
        quantized.in_16_bits_unsupported_reason(*experts(), BF16),
        grouped.fused_unsupported_reason(
            of(4, 8, dtype=BF16), of(2, 8, 8, dtype=BF16), of(2), True
        ),
    )
    assert found == (None if runs else "the device has compute capability below 8.0",) * 2


def test_numbers_of_other_devices_are_refused() -> None:
    given = experts(device="meta")
    found = quantized.in_16_bits_unsupported_reason(*given, BF16)
    assert found == "it runs on cpu and cuda, not on meta"
    found = quantized.fused_unsupported_reason(*given, BF16)
    assert found == "it runs on cuda, not on meta"
    x, weight = of(4, 8, device="meta"), of(2, 8, 8, device="meta")
    found = grouped.fused_unsupported_reason(x, weight, of(2), True)
    assert found == "needs a CPU or CUDA tensor, x is on meta"


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 8), (torch.float32, 4)], ids=str)
def test_rows_of_grouped_products_are_multiples_of_16_bytes(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(inputs: int, outputs: int, device: str) -> str | None:
        x, weight = (
            of(*shape, dtype=dtype, device=device) for shape in ((5, inputs), (2, inputs, outputs))
        )
        return grouped.fused_unsupported_reason(x, weight, of(2), True)

    assert reason(size, 3 * size, "cpu") is None
    for inputs, outputs in ((size // 2, size), (size, size // 2), (size + 1, size)):
        odd = inputs if inputs != size else outputs
        expected = f"rows of {odd} numbers are not a multiple of 16 bytes"
        assert reason(inputs, outputs, "cpu") == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    on_cuda = None if dtype is BF16 else "needs bfloat16 on a CUDA device, x is torch.float32"
    assert reason(size, size, "cuda") == on_cuda
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = None if dtype is BF16 else "needs bfloat16 in compiled code, x is torch.float32"
    assert reason(size, size, "cpu") == compiled


def test_rows_at_aligned_distances_are_not_copied() -> None:
    x = of(6, 12, dtype=torch.float32, device="cpu")
    for view in (x, x.t(), x[:, :8], x[::2], x[:, 4:].t()):
        assert grouped.aligned(view) is view
    for view in (x[:, ::2], of(6, 10, dtype=torch.float32, device="cpu")[:, :8]):
        copy = grouped.aligned(view)
        assert copy is not view and copy.shape == view.shape and copy.is_contiguous()


@pytest.mark.parametrize(
    ("capability", "runs"), [((8, 0), False), ((8, 8), False), ((8, 9), True), ((9, 0), True)]
)
def test_products_in_fp8_need_compute_capability_8_9(
    capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (
        Quantized(of(n, 32), of(1, 1, dtype=torch.float32), FP8_TENSOR, (n, 32)) for n in (3, 16)
    )
    monkeypatch.setattr(_compat, "has_gpu", lambda: False)
    assert matmul.scaled_unsupported_reason(a, b, None, BF16) is None  # they have no values
    on_gpu(capability, monkeypatch, matmul)
    expected = None if runs else "the GPU has no products in FP8 (compute capability 8.9)"
    assert matmul.scaled_unsupported_reason(a, b, None, BF16) == expected
    monkeypatch.setattr(_compat, "has_gpu", lambda: False)
    assert matmul.scaled_unsupported_reason(a, b, None, BF16) == "the driver finds no GPU"


def test_ends_of_groups_are_in_int32_for_the_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.empty(3, dtype=torch.int64)
    for compiles in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiles=compiles: compiles)
        assert grouped.ends_of_groups(counts).dtype == torch.int32
