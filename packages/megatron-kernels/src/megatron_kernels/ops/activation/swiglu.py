"""SwiGLU (Shazeer, 2020), on a fused gate-and-up projection."""

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_kernels.ops.activation import batch_invariant, triton
from megatron_kernels.ops.activation.glu import fused as glu
from megatron_kernels.ops.batch_invariant import NAME, SLOWER, with_gradients_of
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(x: Tensor) -> Tensor:
    """Computes the definition, in at least float32."""
    values = upcast(x)
    gate, up = values[..., 0, :], values[..., 1, :]
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def fused(x: Tensor) -> Tensor:
    """Computes `glu` with the gate SiLU, which saves only `x`."""
    return glu(x, "silu", 0.0, 0.0)


def invariant(x: Tensor) -> Tensor:
    """Computes the definition; the backward pass is that of the fused backend."""
    return with_gradients_of(fused, batch_invariant.swiglu, x)


@op(
    triton_backend(triton.swiglu, triton.unsupported_reason, "one kernel of ours each way"),
    Backend("torch", fused, accept_all, "F.silu and a product, saves its input only"),
    Backend(NAME, invariant, accept_all, "the definition, rounded alike", on_request=SLOWER),
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
