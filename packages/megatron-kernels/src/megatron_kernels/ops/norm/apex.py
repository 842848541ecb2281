"""Apex's fused normalization, used only on request, since torch's own kernels are preferred.

Apex is optional. It is built from its repository and not installed from an index.
"""

import torch
from torch import Tensor

from megatron_kernels.ops.optional import missing_library

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _unsupported_reason(x: Tensor, weight: Tensor, zero_centered: bool) -> str | None:
    if zero_centered:
        return "has no gain of 1 + weight"
    if not x.is_cuda:
        return f"needs a CUDA tensor, x is on {x.device.type}"
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        return f"needs one dtype of float32, float16, bfloat16; got {x.dtype} and {weight.dtype}"
    return missing_library("apex")


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Calls `apex.normalization.fused_layer_norm.fused_layer_norm_affine`."""
    from apex.normalization import (  # type: ignore[import-not-found,unused-ignore]
        fused_layer_norm,
    )

    out: Tensor = fused_layer_norm.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    return out


def layer_norm_unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> str | None:
    """Returns why Apex does not support these arguments, such as no CUDA or two dtypes."""
    if bias is None:
        return "needs a bias"
    return _unsupported_reason(x, weight, zero_centered)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Calls `apex.normalization.fused_layer_norm.fused_rms_norm_affine`."""
    from apex.normalization import (  # type: ignore[import-not-found,unused-ignore]
        fused_layer_norm,
    )

    out: Tensor = fused_layer_norm.fused_rms_norm_affine(x, weight, weight.shape, eps)
    return out


def rms_norm_unsupported_reason(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> str | None:
    """Returns why Apex does not support these arguments, such as no CUDA or two dtypes."""
    if weight is None:
        return "needs a gain"
    return _unsupported_reason(x, weight, zero_centered)
