"""The product of two quantized matrices, `a b^T`.

Both matrices are quantized along their rows, over which the product sums, as matrix units need it.
The definition multiplies the elements by their scales and the matrices in float32, or in float64.
"""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_kernels._compat import is_fake, missing_gpu_reason
from megatron_kernels.ops.low_precision.quantize import Quantized, dequantize
from megatron_kernels.registry import AUTO, Backend, accept_all, op

_FP8: Final = ("e4m3", "e5m2")
_ADA: Final = (8, 9)
"""First compute capability with products in FP8."""


def reference(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Computes the definition."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    y = dequantize(a, exact) @ dequantize(b, exact).t()
    return (y if bias is None else y + bias.to(exact)).to(dtype)


def integers(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplies integers exactly (`torch._int_mm`), then by the scales of rows."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    left, right = _adjacent(a, b)
    y = torch._int_mm(left, right).to(exact)
    y.mul_(a.scales.to(exact)).mul_(b.scales.to(exact).t())
    return (y if bias is None else y.add_(bias.to(exact))).to(dtype)


def _adjacent(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """Returns elements of both, `[m, k]` and `[k, n]`, with those of a sum side by side in memory.

    Quantized transposed matrices have the strides of these, which CUDA kernels refuse.
    """
    return a.elements.contiguous(), b.elements.contiguous().t()


def scaled(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Calls `torch._scaled_mm` (`F.scaled_mm` does not run on CPUs), by tensors or by rows."""
    scale_a, scale_b = a.scales.float(), b.scales.float()
    if a.format.is_per_row:
        scale_b = scale_b.t()
    else:
        scale_a, scale_b = scale_a.view(()), scale_b.view(())
    left, right = _adjacent(a, b)
    y: Tensor = torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=dtype)
    return y if bias is None else y + bias.to(dtype)


def integers_unsupported_reason(
    a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype
) -> str | None:
    """Returns that the elements are not integers with a scale for each row or tensor."""
    for each in (a, b):
        form = each.format
        if form.elements != "int8" or not (form.is_per_row or form.is_per_tensor):
            return f"it multiplies int8 with a scale for each row or tensor, not {form}"
    if a.device.type == "cuda":
        return _shapes_unsupported_reason(a, b, 8, least_rows=17)
    return None if a.device.type == "cpu" else f"it runs on cpu and cuda, not on {a.device.type}"


def scaled_unsupported_reason(
    a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype
) -> str | None:
    """Returns that `torch._scaled_mm` does not multiply these formats or dtypes, or not here."""
    if a.device.type != "cuda":
        return f"it takes thousands of times as long on {a.device.type} as on cuda"
    for each in (a, b):
        form = each.format
        if form.elements not in _FP8 or not (form.is_per_row or form.is_per_tensor):
            return f"it multiplies e4m3 and e5m2 with a scale for each row or tensor, not {form}"
    if a.format.is_per_row != b.format.is_per_row:
        return "one matrix has a scale for each row, the other one for the tensor"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its sums are exact enough for bfloat16 or float16, not for {dtype}"
    if a.format.is_per_row and dtype != torch.bfloat16:
        return f"with a scale for each row it returns bfloat16, not {dtype}"
    if (reason := missing_gpu_reason(a.elements)) is not None:
        return reason
    if not is_fake(a.elements) and torch.cuda.get_device_capability(a.device) < _ADA:
        return "the GPU has no products in FP8 (compute capability 8.9)"
    if a.format.elements == b.format.elements == "e5m2":
        return "CUDA multiplies no two matrices in e5m2"
    return _shapes_unsupported_reason(a, b, 16)


def _shapes_unsupported_reason(
    a: Quantized, b: Quantized, multiple: int, least_rows: int = 0
) -> str | None:
    """Returns that CUDA kernels do not multiply matrices of these shapes."""
    if 0 in (*a.shape, *b.shape):
        return "a matrix is empty"
    if b.shape[0] % multiple or a.shape[1] % multiple:
        sizes = f"{b.shape[0]} and {a.shape[1]}"
        return f"outputs and inputs must be multiples of {multiple}, not {sizes}"
    if a.shape[0] < least_rows:
        return f"it needs at least {least_rows} rows, not {a.shape[0]}"
    return None


@op(
    Backend("int_mm", integers, integers_unsupported_reason, "torch._int_mm, exact sums"),
    Backend("scaled_mm", scaled, scaled_unsupported_reason, "torch._scaled_mm"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def quantized_matmul(
    a: Quantized,
    b: Quantized,
    bias: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "m n"]:
    """Computes `a b^T` of quantized matrices, plus a bias. Has no gradient.

    Args:
        a: Matrix `[m, k]`.
        b: Matrix `[n, k]`.
        bias: Bias `[n]`. Defaults to none.
        dtype: Dtype of the result. Sums are float32, or float64 for it.
        backend: "auto" or the name of one backend.

    Returns:
        `[m, n]`.
    """
    return quantized_matmul.run(backend, a, b, bias, dtype)
