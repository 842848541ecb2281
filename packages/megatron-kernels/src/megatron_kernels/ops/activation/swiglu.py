"""SwiGLU (Shazeer, 2020), on a fused gate-and-up projection."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(x: Tensor) -> Tensor:
    """Computes the definition, in at least float32."""
    values = upcast(x)
    gate, up = values[..., 0, :], values[..., 1, :]
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def fused(x: Tensor) -> Tensor:
    """Computes `F.silu` of the first half times the second half.

    `unbind` instead of two selections: its backward writes both gradients into one new tensor,
    where two selections would each fill a zero tensor of the whole size and add them.
    """
    gate, up = x.unbind(-2)
    return functional.silu(gate) * up


@op(
    Backend("torch", fused, accept_all, "F.silu and a product"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def swiglu(x: Float[Tensor, "*rows 2 f"], *, backend: str = AUTO) -> Float[Tensor, "*rows f"]:
    """Computes silu(gate) * up, where silu(g) = g * sigmoid(g).

    Args:
        x: `[..., 2, f]`: gate at index 0, up at index 1 of the second last dim.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., f]` in the dtype of `x`.
    """
    return swiglu.run(backend, x)
