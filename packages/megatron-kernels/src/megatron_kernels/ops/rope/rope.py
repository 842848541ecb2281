"""The rotation of rotary position embedding (Su et al., RoFormer, section 3.2)."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.rope import triton
from megatron_kernels.ops.triton_op import triton_backend
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
    product = torch.complex(*pairs.unbind(-1)) * rotation
    pairs = torch.stack((product.real, product.imag), -1)
    rotated = (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat((rotated, rest), -1).to(x.dtype)


def direct(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Uses real arithmetic on the two halves; float32 tables promote low-precision input."""
    if not torch.compiler.is_compiling():
        result: Tensor = _Rotation.apply(x, cos, sin, interleaved, 1, False)  # type: ignore[no-untyped-call]
        return result
    if x.is_cuda:
        return swapped(x, cos, sin, interleaved)
    return joined(x, cos, sin, interleaved)


def joined(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Joins the rotated halves; autograd computes the gradient."""
    half = cos.shape[-1]
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    first, second = _halves(x, half, interleaved)
    parts = (
        torch.addcmul(first * c, second, s, value=-1),
        torch.addcmul(second * c, first, s),
    )
    rotated = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    rotated = rotated.to(x.dtype)
    if 2 * half < x.shape[-1]:
        return torch.cat((rotated, x[..., 2 * half :]), -1)
    return rotated


def swapped(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Adds channels times cosines, and channels swapped in each pair times signed sines.

    The gradient is rotated back, likewise. Inductor computes a longer expression, such as that of
    autograd for `joined`, in a kernel of its own, and copies the results of queries and keys into
    the gradient of the projection in another one.
    """
    result: Tensor = _Rotation.apply(x, cos, sin, interleaved, 1, True)  # type: ignore[no-untyped-call]
    return result


class _Rotation(Function):
    """A rotation by angles times a direction. The gradient is rotated by the opposite angles."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        direction: int,
        swaps: bool,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.direction, ctx.swaps = interleaved, direction, swaps
        rotate = _rotate_swapped if swaps else _rotate_halves
        return rotate(x, cos, sin, interleaved, direction)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        opposite = *ctx.saved_tensors, ctx.interleaved, -ctx.direction, ctx.swaps
        back: Tensor = _Rotation.apply(grads[0], *opposite)  # type: ignore[no-untyped-call]
        return back, *(None,) * len(opposite)


def _rotate_halves(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int
) -> Tensor:
    """Writes the rotated halves into one tensor."""
    half = cos.shape[-1]
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    out = x.new_empty(x.shape)
    first, second = _halves(x, half, interleaved)
    into_first, into_second = _halves(out, half, interleaved)
    torch.addcmul(first * c, second, s, value=-direction, out=into_first)
    torch.addcmul(second * c, first, s, value=direction, out=into_second)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _rotate_swapped(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, direction: int
) -> Tensor:
    """Computes the sum that `swapped` describes."""
    half, dim = cos.shape[-1], -1 if interleaved else -2
    pairs = torch.unflatten(x[..., : 2 * half], -1, (half, 2) if interleaved else (2, half))
    c, s = (table[:, :, None, :].unsqueeze(dim) for table in (cos, sin))
    signs = direction * (2 * torch.arange(2, device=x.device) - 1)
    s = s * (signs if interleaved else signs[:, None])
    rotated = (pairs * c + pairs.flip(dim) * s).to(x.dtype).flatten(-2)
    if 2 * half < x.shape[-1]:
        return torch.cat((rotated, x[..., 2 * half :]), -1)
    return rotated


def _halves(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Returns views of the two channels of each pair."""
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


@op(
    triton_backend(triton.rope, triton.unsupported_reason, "one kernel of ours each way"),
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
