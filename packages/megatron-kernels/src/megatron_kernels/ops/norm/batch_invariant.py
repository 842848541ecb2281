"""Batch-invariant norms: sums over a row are added in halves."""

import torch
from torch import Tensor

from megatron_kernels.ops.batch_invariant import row_sum
from megatron_kernels.ops.norm.gain import gain_of
from megatron_kernels.ops.precision import upcast


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Computes the definition of RMSNorm."""
    values = upcast(x)
    normal = values * torch.rsqrt(row_sum(values.square()) / x.shape[-1] + eps)
    return (normal if weight is None else normal * gain_of(weight, zero_centered)).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Computes the definition of LayerNorm."""
    values = upcast(x)
    centred = values - row_sum(values) / x.shape[-1]
    normal = centred * torch.rsqrt(row_sum(centred.square()) / x.shape[-1] + eps)
    scaled = normal * gain_of(weight, zero_centered)
    return (scaled if bias is None else scaled + bias).to(x.dtype)
