"""GELU and SwiGLU of a sum with a bias, which Megatron-LM fuses (`--bias-gelu-fusion`).

The output layer of the sum returns it without its bias then.
"""

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.ops.activation import gelu as gelu_module
from megatron_kernels.ops.activation import swiglu as swiglu_module
from megatron_kernels.ops.activation import triton
from megatron_kernels.ops.activation.gelu import Approximation
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def _gelu_reference(x: Tensor, bias: Tensor, approximate: Approximation) -> Tensor:
    """Computes the definition, in at least float32."""
    return gelu_module.reference(upcast(x) + upcast(bias), approximate).to(x.dtype)


def _gelu_fused(x: Tensor, bias: Tensor, approximate: Approximation) -> Tensor:
    """Computes a sum in the dtype of `x`, then `F.gelu`."""
    return gelu_module.fused((x + bias).to(x.dtype), approximate)


def _swiglu_reference(x: Tensor, bias: Tensor) -> Tensor:
    """Computes the definition, in at least float32."""
    return swiglu_module.reference(upcast(x) + upcast(bias)).to(x.dtype)


def _swiglu_fused(x: Tensor, bias: Tensor) -> Tensor:
    """Computes a sum in the dtype of `x`, then SwiGLU."""
    return swiglu_module.fused((x + bias).to(x.dtype))


@op(
    triton_backend(triton.bias_gelu, triton.bias_unsupported_reason, "one kernel of ours each way"),
    Backend("torch", _gelu_fused, accept_all, "a sum, then F.gelu"),
    Backend("reference", _gelu_reference, accept_all, "plain torch, in float32 or float64"),
)
def bias_gelu(
    x: Float[Tensor, "*rows f"],
    bias: Float[Tensor, " f"],
    approximate: Approximation = "none",
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows f"]:
    """Applies GELU to `x + bias`, elementwise.

    Args:
        x: Output of a linear layer without its bias, `[..., f]`.
        bias: The bias `[f]`.
        approximate: "none" for the error function, "tanh" for the approximation of GPT-2.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., f]` in the dtype of `x`.
    """
    return bias_gelu.run(backend, x, bias, approximate)


@op(
    triton_backend(
        triton.bias_swiglu, triton.bias_unsupported_reason, "one kernel of ours each way"
    ),
    Backend("torch", _swiglu_fused, accept_all, "a sum, then SwiGLU"),
    Backend("reference", _swiglu_reference, accept_all, "plain torch, in float32 or float64"),
)
def bias_swiglu(
    x: Float[Tensor, "*rows 2 f"], bias: Float[Tensor, "2 f"], *, backend: str = AUTO
) -> Float[Tensor, "*rows f"]:
    """Computes silu(gate) * up of `x + bias`.

    Args:
        x: Output of a linear layer without its bias, `[..., 2, f]`: gate at index 0, up at index 1.
        bias: The bias `[2, f]`.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., f]` in the dtype of `x`.
    """
    return bias_swiglu.run(backend, x, bias)
