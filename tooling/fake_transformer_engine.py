"""A plain replacement of the names of Transformer Engine that megatron-kernels uses.

Signatures are the parameters that the versions 2.10 to 2.20 have in common. Products are computed
in float64 of the numbers that the quantizers leave. A quantized tensor has only the halves that
were asked for (`rowwise`, `columnwise`), and refuses every operation that would turn it into a
plain one unnoticed.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fake_libraries
import pytest
import torch
import torch.distributed as dist
from megatron_kernels import (
    FP8_BLOCK,
    FP8_BLOCK_2D,
    MXFP8,
    NVFP4,
    NVFP4_2D,
    QuantFormat,
    dequantize,
    quantize,
)
from megatron_kernels.transformer_engine import library
from torch import Tensor

DType = SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2", kFloat4E2M1="e2m1")
TE_DType = {d: f"te {d}" for d in (torch.float32, torch.float16, torch.bfloat16)}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class QuantizedTensor(Tensor):
    """A tensor of rounded numbers, with the nominal dtype of what was quantized."""

    rowwise: Tensor | None
    columnwise: Tensor | None
    scale: Tensor | None

    @staticmethod
    def make(
        like: Tensor, rowwise: Tensor | None, columnwise: Tensor | None, scale: Tensor | None
    ) -> "QuantizedTensor":
        """Returns a tensor; one with a single scale can make its columns of its rows."""
        shape = next(each.shape for each in (rowwise, columnwise) if each is not None)
        made = Tensor._make_wrapper_subclass(
            QuantizedTensor, shape, dtype=like.dtype, device=like.device
        )
        made.rowwise, made.columnwise, made.scale = rowwise, columnwise, scale
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        x = args[0]
        if func is torch.ops.aten.detach.default:
            return cls.make(x, x.rowwise, x.columnwise, x.scale)
        assert func is torch.ops.aten.view.default, f"{func} of a quantized tensor"
        views = [None if t is None else t.view(args[1]) for t in (x.rowwise, x.columnwise)]
        return cls.make(x, *views, x.scale)

    def __repr__(self) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {self.dtype})"

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Makes or drops halves."""
        if columnwise_usage and self.columnwise is None:
            assert self.scale is not None, "columns of blocks cannot be made of rows"
            self.columnwise = self.rowwise
        if rowwise_usage:
            assert self.rowwise is not None
        if rowwise_usage is False:
            self.rowwise = None


class Quantizer:
    """Rounds a tensor for the products that sum over its columns, its rows, or both."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        assert rowwise or isinstance(self, MXFP8Quantizer), "kernels do not make columns alone"

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        """Quantizes a tensor."""
        x = tensor.detach().double()
        both = self.rounded(x) if self.scales_tensor else None
        rows = self.rounded(x) if both is None else both
        columns = self.turned(x) if both is None else both
        return QuantizedTensor.make(
            tensor,
            rows if self.rowwise_usage else None,
            columns if self.columnwise_usage else None,
            self.last_scale if self.scales_tensor else None,
        )

    scales_tensor = False
    last_scale: Tensor | None = None

    def rounded(self, x: Tensor) -> Tensor:
        """Returns what remains of a tensor, with scales along its rows."""
        return dequantize(quantize(x.reshape(-1, x.shape[-1]), self.form())).view(x.shape)

    def turned(self, x: Tensor) -> Tensor:
        """Returns what remains of a tensor, with scales along its columns."""
        matrix = x.reshape(-1, x.shape[-1]).t()
        return dequantize(quantize(matrix, self.form())).t().reshape(x.shape)

    def form(self) -> QuantFormat:
        """Returns the format of blocks."""
        raise TypeError(f"{type(self).__name__} has one scale for a tensor, not blocks")

    def cast(self, x: Tensor, scale: Tensor, elements: str) -> Tensor:
        """Returns numbers of 8 bits, divided by their scale again."""
        self.last_scale = scale.clone()
        limit = torch.finfo(FP8[elements]).max
        return (x * scale).clamp(-limit, limit).to(FP8[elements]).double() / scale


class Float8Quantizer(Quantizer):
    """One scale, of the caller."""

    scales_tensor = True

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert scale.shape == amax.shape == (1,) and scale.dtype == amax.dtype == torch.float32
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def rounded(self, x: Tensor) -> Tensor:
        """Raises the largest magnitude, as the kernels do, and rounds."""
        self.amax.copy_(torch.maximum(self.amax, x.abs().amax().float()))
        return self.cast(x, self.scale.double(), self.dtype)


class Float8CurrentScalingQuantizer(Quantizer):
    """One scale, of the tensor."""

    scales_tensor = True

    def __init__(
        self,
        fp8_dtype: str,
        device: torch.device,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert not use_existing_amax and scale is None and amax is None and amax_epsilon == 0
        self.dtype, self.device, self.powers = fp8_dtype, device, force_pow_2_scales
        self.group = amax_reduction_group
        assert with_amax_reduction == (self.group is not None)

    def rounded(self, x: Tensor) -> Tensor:
        """Finds the scale and rounds."""
        amax = x.abs().amax()[None]
        if self.group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, self.group)
        scale = torch.where(amax > 0, torch.finfo(FP8[self.dtype]).max / amax, 1.0)
        return self.cast(x, torch.exp2(scale.log2().floor()) if self.powers else scale, self.dtype)


class MXFP8Quantizer(Quantizer):
    """Scales of 32 elements."""

    def __init__(self, fp8_dtype: str, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def form(self) -> QuantFormat:
        """Returns the format."""
        return replace(MXFP8, elements=self.dtype)


class Float8BlockQuantizer(Quantizer):
    """Scales of 128 or 128 x 128 elements."""

    def __init__(
        self,
        fp8_dtype: str,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert amax_epsilon == 0.0 and force_pow_2_scales
        self.dtype, self.dims = fp8_dtype, block_scaling_dim

    def form(self) -> QuantFormat:
        """Returns the format."""
        return replace(FP8_BLOCK_2D if self.dims == 2 else FP8_BLOCK, elements=self.dtype)


class NVFP4Quantizer(Quantizer):
    """Scales of 16 or 16 x 16 elements; always rounds to the nearest, without transforms."""

    def __init__(
        self,
        fp4_dtype: str = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert fp4_dtype == "e2m1" and with_rht == with_post_rht_amax and with_random_sign_mask
        assert not with_amax_reduction and amax_reduction_group is None
        self.options = with_rht, with_2d_quantization, stochastic_rounding

    def form(self) -> QuantFormat:
        """Returns the format."""
        return NVFP4_2D if self.options[1] else NVFP4


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor, None, None, None]:
    """Multiplies plain or quantized operands in float64."""
    unused = quantization_params, gelu_in, beta, ub, ub_type, extra_output
    assert all(each is None for each in unused) and not gelu and not bulk_overlap and alpha == 1.0
    assert grad == (layout != "TN") and (use_split_accumulator or layout == "TN")
    assert isinstance(A, QuantizedTensor) == isinstance(B, QuantizedTensor)
    assert A.dtype == B.dtype and A.dtype in TE_DType
    left, right = _half(A, layout[0] == "T"), _half(B, layout[1] == "N")
    left = left.t() if layout[0] == "T" else left
    product = right.t() @ left if layout[1] == "T" else right @ left
    if bias is not None:
        assert bias.dtype == out_dtype and (bias.itemsize == 2 or type(A) is not QuantizedTensor)
        product = product + bias.double()
    if out is None:
        assert not accumulate
        return product.to(out_dtype or A.dtype), None, None, None
    assert out.is_contiguous() and out.dtype == out_dtype and out.shape == product.shape
    out.copy_(out.double() + product if accumulate else product)
    return out, None, None, None


def _half(x: Tensor, rowwise: bool) -> Tensor:
    """Returns the numbers of an operand for a product that sums over its columns or its rows."""
    if not isinstance(x, QuantizedTensor):
        assert x.is_contiguous()
        return x.detach().double() if rowwise else x.detach().double().reshape(-1, x.shape[-1])
    found = x.rowwise if rowwise else x.columnwise
    assert found is not None, f"{'rowwise' if rowwise else 'columnwise'} half is missing"
    return found if rowwise else found.reshape(-1, x.shape[-1])


def gather_along_first_dim(
    inp: Tensor, process_group: Any, async_op: bool = False, quantizer: Any = None
) -> tuple[Tensor, Any]:
    """Gathers the rows of a quantized tensor, whose scale must be that of all ranks."""
    assert isinstance(inp, QuantizedTensor) and quantizer is None
    assert inp.rowwise is not None and inp.scale is not None
    size = dist.get_world_size(process_group)
    scales = [torch.empty_like(inp.scale) for _ in range(size)]
    dist.all_gather(scales, inp.scale, process_group)
    assert all(torch.equal(each, scales[0]) for each in scales)
    parts = [torch.empty_like(inp.rowwise) for _ in range(size)]
    work = dist.all_gather(parts, inp.rowwise.contiguous(), process_group, async_op=async_op)
    if work is not None:
        work.wait()
    return QuantizedTensor.make(inp, torch.cat(parts), None, inp.scale), work


def available(return_reason: bool = False) -> Any:
    """Returns that a recipe is supported."""
    return (True, "") if return_reason else True


def layernorm_fwd(
    input: Tensor,  # noqa: A002 - the published name
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: None,
    quantizer: Quantizer | None,
    otype: str,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes LayerNorm of rows."""
    assert input.dim() == 2 and input.is_contiguous() and otype == f"te {input.dtype}"
    assert ln_out is None and sm_margin == 0
    x = input.double()
    mean = x.mean(1, keepdim=True)
    inverse = (x.var(1, keepdim=True, correction=0) + eps).rsqrt()
    y = (x - mean) * inverse * (weight.double() + zero_centered_gamma) + bias.double()
    return _normed(y, input, quantizer), mean.float().flatten(), inverse.float().flatten()


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of LayerNorm."""
    assert dz.shape == x.shape and dz.is_contiguous() and sm_margin == 0
    inverse, dy = rsigma.double()[:, None], dz.double()
    normal = (x.double() - mu.double()[:, None]) * inverse
    of_normal = dy * (gamma.double() + zero_centered_gamma)
    shared = normal * (of_normal * normal).mean(1, keepdim=True)
    dx = inverse * (of_normal - of_normal.mean(1, keepdim=True) - shared)
    return dx.to(x.dtype), (dy * normal).sum(0).to(gamma.dtype), dy.sum(0).to(gamma.dtype)


def rmsnorm_fwd(
    input: Tensor,  # noqa: A002 - the published name
    weight: Tensor,
    eps: float,
    ln_out: None,
    quantizer: Quantizer | None,
    otype: str,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Computes RMSNorm of rows."""
    assert input.dim() == 2 and input.is_contiguous() and otype == f"te {input.dtype}"
    assert ln_out is None and sm_margin == 0
    x = input.double()
    inverse = (x.square().mean(1, keepdim=True) + eps).rsqrt()
    y = x * inverse * (weight.double() + zero_centered_gamma)
    return _normed(y, input, quantizer), None, inverse.float().flatten()


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of RMSNorm."""
    assert dz.shape == x.shape and dz.is_contiguous() and sm_margin == 0
    inverse, dy = rsigma.double()[:, None], dz.double()
    normal = x.double() * inverse
    of_normal = dy * (gamma.double() + zero_centered_gamma)
    dx = inverse * (of_normal - normal * (of_normal * normal).mean(1, keepdim=True))
    return dx.to(x.dtype), (dy * normal).sum(0).to(gamma.dtype)


def _normed(y: Tensor, like: Tensor, quantizer: Quantizer | None) -> Tensor:
    return y.to(like.dtype) if quantizer is None else quantizer(y.to(like.dtype))


def install(monkeypatch: pytest.MonkeyPatch, *, on_cpu: bool = False) -> None:
    """Makes Transformer Engine importable.

    Args:
        monkeypatch: Undoes it.
        on_cpu: Whether tensors on a CPU pass for those on a CUDA device.
    """
    quantizers = (
        Float8Quantizer,
        Float8CurrentScalingQuantizer,
        MXFP8Quantizer,
        Float8BlockQuantizer,
        NVFP4Quantizer,
    )
    questions = ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4")
    fake_libraries.install(
        monkeypatch,
        transformer_engine=SimpleNamespace(),
        transformer_engine_torch=SimpleNamespace(
            DType=DType,
            layernorm_fwd=layernorm_fwd,
            layernorm_bwd=layernorm_bwd,
            rmsnorm_fwd=rmsnorm_fwd,
            rmsnorm_bwd=rmsnorm_bwd,
        ),
        transformer_engine__pytorch=SimpleNamespace(
            QuantizedTensor=QuantizedTensor,
            Quantizer=Quantizer,
            **{each.__name__: each for each in quantizers},
            **{f"is_{name}_available": available for name in questions},
        ),
        transformer_engine__pytorch__constants=SimpleNamespace(TE_DType=TE_DType),
        transformer_engine__pytorch__cpp_extensions=SimpleNamespace(general_gemm=general_gemm),
        transformer_engine__pytorch__distributed=SimpleNamespace(
            gather_along_first_dim=gather_along_first_dim
        ),
    )
    if on_cpu:
        monkeypatch.setattr(library, "device_reason", lambda _: None)
        monkeypatch.setattr(library, "missing_library", lambda _: None)
