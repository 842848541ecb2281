"""Linear layers and norms by Transformer Engine (NVIDIA): CUDA, one dtype for all tensors.

The norms call its kernels `layernorm_fwd`, `layernorm_bwd`, `rmsnorm_fwd` and `rmsnorm_bwd`, which
its own modules call. The linear layer is its module `Linear`, with our weights in place of its own.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.ops.optional import missing_library

NAME: Final = "transformer_engine"
"""Name of these backends."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_ALL_MULTIPROCESSORS: Final = 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Calls `transformer_engine.pytorch.Linear`."""
    from transformer_engine.pytorch import (  # type: ignore[import-not-found,unused-ignore]
        Linear,
    )

    outputs, inputs = weight.shape
    module = Linear(
        inputs, outputs, bias=bias is not None, params_dtype=weight.dtype, device="meta"
    )
    own = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    out: Tensor = torch.func.functional_call(module, own, (x,))
    return out


def linear_unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Returns why Transformer Engine does not support these arguments."""
    return _unsupported_reason(x, *(each for each in (weight, bias) if each is not None))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Calls the kernels of LayerNorm."""
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, zero_centered)  # type: ignore[no-untyped-call]
    return y


def layer_norm_unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> str | None:
    """Returns why Transformer Engine does not support these arguments."""
    return "needs a bias" if bias is None else _unsupported_reason(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Calls the kernels of RMSNorm."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return y


def rms_norm_unsupported_reason(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> str | None:
    """Returns why Transformer Engine does not support these arguments."""
    return "needs a gain" if weight is None else _unsupported_reason(x, weight)


def _unsupported_reason(x: Tensor, *others: Tensor) -> str | None:
    if not x.is_cuda:
        return f"needs a CUDA tensor, x is on {x.device.type}"
    dtypes = {each.dtype for each in (x, *others)}
    if len(dtypes) > 1 or x.dtype not in _DTYPES:
        found = ", ".join(sorted(map(str, dtypes)))
        return f"needs one dtype of float32, float16, bfloat16; got {found}"
    return missing_library("transformer-engine")


def _kernels() -> tuple[Any, Any]:
    """Returns the module of kernels and its table of dtypes."""
    import transformer_engine_torch  # type: ignore[import-not-found,unused-ignore]
    from transformer_engine.pytorch.constants import (  # type: ignore[import-not-found,unused-ignore]
        TE_DType,
    )

    return transformer_engine_torch, TE_DType


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
    ) -> Tensor:
        kernels, dtypes = _kernels()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, quantizer = None, None
        y, mean, inverse = kernels.layernorm_fwd(
            rows,
            weight,
            bias,
            eps,
            out,
            quantizer,
            dtypes[x.dtype],
            _ALL_MULTIPROCESSORS,
            zero_centered,
        )
        ctx.save_for_backward(rows, mean, inverse, weight)
        ctx.zero_centered = zero_centered
        normed: Tensor = y.view(x.shape)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, mean, inverse, weight = ctx.saved_tensors
        dy = grads[0].reshape(rows.shape).contiguous()
        dx, dweight, dbias = _kernels()[0].layernorm_bwd(
            dy, rows, mean, inverse, weight, _ALL_MULTIPROCESSORS, ctx.zero_centered
        )
        return dx.view(grads[0].shape), dweight, dbias, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        kernels, dtypes = _kernels()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, quantizer = None, None
        y, _, inverse = kernels.rmsnorm_fwd(
            rows,
            weight,
            eps,
            out,
            quantizer,
            dtypes[x.dtype],
            _ALL_MULTIPROCESSORS,
            zero_centered,
        )
        ctx.save_for_backward(rows, inverse, weight)
        ctx.zero_centered = zero_centered
        normed: Tensor = y.view(x.shape)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, inverse, weight = ctx.saved_tensors
        dy = grads[0].reshape(rows.shape).contiguous()
        dx, dweight = _kernels()[0].rmsnorm_bwd(
            dy, rows, inverse, weight, _ALL_MULTIPROCESSORS, ctx.zero_centered
        )
        return dx.view(grads[0].shape), dweight, None, None
