"""The rotation of rotary position embedding (Su et al., RoFormer, section 3.2)."""

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Multiplies each pair, as a complex number, by cos + i sin, as in the paper."""
    half = cos.shape[-1]
    values = upcast(x)
    rotated, rest = values[..., : 2 * half], values[..., 2 * half :]
    if interleaved:
        pairs = rotated.view(*x.shape[:-1], half, 2)
    else:
        pairs = rotated.view(*x.shape[:-1], 2, half).transpose(-1, -2)
    rotation = torch.complex(cos.to(values.dtype), sin.to(values.dtype))[:, :, None, :]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * rotation)
    rotated = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat((rotated, rest), -1).to(x.dtype)


def direct(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Uses real arithmetic on the two halves; float32 tables promote low-precision input."""
    half = cos.shape[-1]
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    rotated = x[..., : 2 * half] if 2 * half < x.shape[-1] else x
    if interleaved:
        first, second = rotated.view(*x.shape[:-1], half, 2).unbind(-1)
    else:
        first, second = rotated.chunk(2, -1)
    parts = (first * c - second * s, second * c + first * s)
    rotated = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    rotated = rotated.to(x.dtype)
    if 2 * half < x.shape[-1]:
        return torch.cat((rotated, x[..., 2 * half :]), -1)
    return rotated


@op(
    Backend("torch", direct, accept_all, "real arithmetic on halves, fused by torch.compile"),
    Backend("reference", reference, accept_all, "complex multiplication, in float32 or float64"),
)
def rope(
    x: Float[Tensor, "s b n d"],
    cos: Float[Tensor, "s b_or_1 half"],
    sin: Float[Tensor, "s b_or_1 half"],
    interleaved: bool = False,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "s b n d"]:
    """Rotates the first r = 2 * half channels of every head by its token's angles.

    Args:
        x: Queries or keys `[s, b, n, d]`. Channels from r on are unchanged.
        cos: Cosines `[s, b or 1, r/2]` from `rope_tables`, r <= d.
        sin: Sines of the same shape.
        interleaved: False pairs channel i with i + r/2 (Llama, "rotate half"); True pairs 2i with
            2i + 1 (the paper, GPT-J).
        backend: "auto" or the name of one backend.

    Returns:
        `[s, b, n, d]` in the dtype of `x`.
    """
    return rope.run(backend, x, cos, sin, interleaved)
