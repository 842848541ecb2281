"""Apex's fused normalization, used only on request, since torch's own kernels are preferred.

Apex is optional. It is built from its repository and not installed from an index.
"""

import torch
from torch import Tensor

from megatron_kernels.ops.optional import missing_library

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _unsupported_reason(x: Tensor, weight: Tensor) -> str | None:
    if not x.is_cuda:
        return f"needs a CUDA tensor, x is on {x.device.type}"
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        return f"needs one dtype of float32, float16, bfloat16; got {x.dtype} and {weight.dtype}"
    return missing_library("apex")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Calls `apex.normalization.fused_layer_norm.fused_layer_norm_affine`."""
    from apex.normalization import (  # type: ignore[import-not-found,unused-ignore]
        fused_layer_norm,
    )

    out: Tensor = fused_layer_norm.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    return out


def layer_norm_unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> str | None:
    """Returns why Apex does not support these arguments: no CUDA, two dtypes, or no Apex."""
    return _unsupported_reason(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Calls `apex.normalization.fused_layer_norm.fused_rms_norm_affine`."""
    from apex.normalization import (  # type: ignore[import-not-found,unused-ignore]
        fused_layer_norm,
    )

    out: Tensor = fused_layer_norm.fused_rms_norm_affine(x, weight, weight.shape, eps)
    return out


def rms_norm_unsupported_reason(x: Tensor, weight: Tensor, eps: float) -> str | None:
    """Returns why Apex does not support these arguments: no CUDA, two dtypes, or no Apex."""
    return _unsupported_reason(x, weight)
