"""Products of experts in FP8 against float64, and calls of torch's kernel for them."""

from unittest.mock import patch

import pytest
import torch
from megatron_kernels import (
    KernelError,
    quantize_tensor,
    quantized_grouped_gradient,
    quantized_grouped_matmul,
)
from megatron_kernels.ops.moe.quantized_grouped_matmul import (
    fused,
    fused_gradient,
    rows_with_room,
)
from torch import Tensor

COUNTS = torch.tensor([5, 0, 17, 1])
ROWS, INPUTS, OUTPUTS = 26, 32, 48


def operand(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    found = quantize_tensor(torch.randn(shape, generator=generator), columns=False)
    return found.rows, found.scale


def number(given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0].double() * given[1].double()


X, DY, WEIGHT = operand(ROWS, INPUTS), operand(ROWS, OUTPUTS), operand(4, OUTPUTS, INPUTS)


def expected_product() -> Tensor:
    out, start = torch.zeros(ROWS, OUTPUTS, dtype=torch.float64), 0
    for matrix, count in zip(number(WEIGHT), COUNTS.tolist(), strict=True):
        out[start : start + count] = number(X)[start : start + count] @ matrix.t()
        start += count
    return out


def expected_gradient() -> Tensor:
    found, start = [], 0
    for count in COUNTS.tolist():
        part = slice(start, start + count)
        found.append(number(DY)[part].t() @ number(X)[part])
        start += count
    return torch.stack(found)


@pytest.mark.parametrize("backend", ["grouped_mm", "torch", "reference"])
def test_products_and_gradients_equal_those_of_the_numbers_in_float64(backend: str) -> None:
    dtypes = [torch.bfloat16] if backend == "grouped_mm" else [torch.float32, torch.float64]
    for dtype in dtypes:
        close = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
        y = quantized_grouped_matmul(*X, *WEIGHT, COUNTS, dtype, backend=backend)
        dw = quantized_grouped_gradient(*DY, *X, COUNTS, dtype, backend=backend)
        assert y.dtype == dw.dtype == dtype
        torch.testing.assert_close(y.double(), expected_product(), rtol=close, atol=close)
        torch.testing.assert_close(dw.double(), expected_gradient(), rtol=close, atol=close)


def emulated(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype):
    """What `torch._scaled_grouped_mm` computes, with the checks of its CUDA implementation."""
    assert offs.dtype == torch.int32 and offs.is_contiguous()
    assert a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16
    assert a.stride(-1) == 1 and b.stride(-2) == 1  # row-major, column-major
    assert a.stride(-2) % 16 == 0 and b.stride(-1) % 16 == 0
    assert a.shape[-1] % 16 == 0 and b.shape[-1] % 16 == 0 and b.shape[-2] % 16 == 0
    assert scale_a.is_contiguous() and scale_b.is_contiguous()
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    if b.dim() == 3:  # rows by group; the rest is memory without values
        assert scale_a.shape == a.shape[:1] and scale_b.shape == (len(b), b.shape[2])
        out = torch.full((len(a), b.shape[2]), torch.nan, dtype=torch.float64)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
            product = a[start:end].double() @ b[group].double()
            out[start:end] = product * scale_a[start:end, None] * scale_b[group]
        return out.to(out_dtype)
    assert all(start % 16 == 0 for start in starts), "a group begins between two vectors"
    assert ends == sorted(ends) and all(s < e for s, e in zip(starts, ends, strict=True))
    assert scale_a.shape == (len(ends) * len(a),) and scale_b.shape == (len(ends) * b.shape[1],)
    products = [
        a[:, s:e].double() @ b[s:e].double() * scale_a[0] * scale_b[0]
        for s, e in zip(starts, ends, strict=True)
    ]
    return torch.stack(products).to(out_dtype)


def test_the_kernel_of_torch_gets_what_it_takes() -> None:
    with patch.object(torch, "_scaled_grouped_mm", emulated):
        y = fused(*X, *WEIGHT, COUNTS, torch.bfloat16)
        dw = fused_gradient(*DY, *X, COUNTS, torch.bfloat16)
    torch.testing.assert_close(y.double(), expected_product(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dw.double(), expected_gradient(), rtol=1e-2, atol=1e-2)


def test_groups_get_room_up_to_a_multiple_of_16_rows() -> None:
    source, ends = rows_with_room(COUNTS, ROWS)
    assert ends.tolist() == [16, 32, 64, 80]
    assert len(source) == 32 + 4 * 16
    taken = [int(each) for each in source if each < ROWS]
    assert taken == list(range(23))  # the rows of no group are left out
    assert [int((source[:16] < ROWS).sum()), int((source[16:32] < ROWS).sum())] == [5, 0]
    source, ends = rows_with_room(torch.tensor([16, 15, 32, 17]), 80)
    assert ends.tolist() == [16, 32, 64, 96]  # groups without room to spare among them
    assert source[:31].tolist() == [*range(31)] and source[31] == 80
    assert source[32:81].tolist() == [*range(31, 80)] and (source[81:] == 80).all()


def test_a_backend_is_chosen_with_a_reason() -> None:
    choice = quantized_grouped_matmul.explain(*X, *WEIGHT, COUNTS, torch.bfloat16)
    assert choice.backend == "grouped_mm"
    assert "it runs on cuda, not on cpu" in choice.reason
    choice = quantized_grouped_matmul.explain(*X, *WEIGHT, COUNTS, torch.float64)
    assert choice.backend == "torch" and "returns bfloat16, not torch.float64" in choice.reason
    with pytest.raises(KernelError, match="3 counts for 4 matrices"):
        quantized_grouped_matmul(*X, *WEIGHT, COUNTS[:3])
