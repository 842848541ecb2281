"""SwiGLU (Shazeer, 2020), on a fused gate-and-up projection."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(x: Tensor) -> Tensor:
    """Written out, in float32 at least."""
    values = upcast(x)
    gate, up = values[..., 0, :], values[..., 1, :]
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def fused(x: Tensor) -> Tensor:
    """`F.silu` times the second half.

    `unbind`, not two selections: its backward writes both gradients into one new tensor, where two
    selections would each fill a zero tensor of the whole size and add them.
    """
    gate, up = x.unbind(-2)
    return functional.silu(gate) * up


@op(
    Backend("torch", fused, accept_all, "F.silu and a product"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def swiglu(x: Float[Tensor, "*rows 2 f"], *, backend: str = AUTO) -> Float[Tensor, "*rows f"]:
    """silu(gate) * up, where silu(g) = g * sigmoid(g).

    Args:
        x: `[..., 2, f]`: gate at index 0, up at index 1 of the second last dimension.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., f]` in the dtype of `x`.
    """
    return swiglu.run(backend, x)
