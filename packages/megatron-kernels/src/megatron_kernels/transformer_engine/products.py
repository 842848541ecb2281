"""The three products of a linear layer by Transformer Engine's `general_gemm`.

An operand is a tensor, or one that a quantizer of `TransformerEngineRecipe` made. Products of the
backward pass add in fp32 (`use_split_accumulator`), as its own modules do.

| product | computes | layout | needs of a quantized operand |
|---|---|---|---|
| `te_forward` | `x W^T + b` | TN | rows of both |
| `te_dgrad` | `dy W` | NN | rows of dy, columns of W |
| `te_wgrad` | `dy^T x` | NT | columns of both |
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.transformer_engine import library


def te_forward(
    x: Float[Tensor, "*rows k"],
    weight: Float[Tensor, "out k"],
    bias: Float[Tensor, " out"] | None = None,
    *,
    exact: bool = False,
) -> Float[Tensor, "*rows out"]:
    """Returns `x W^T + b` in the dtype of the input.

    Args:
        x: Input.
        weight: Weight.
        bias: Bias, or None.
        exact: Whether products in few bits add in fp32. On Hopper they are slower then.
    """
    own, dtype = bias, x.dtype
    if dtype == torch.float32 and is_quantized(x):
        own = None  # products in few bits have no bias in float32
    y = library.general_gemm(
        _dense(weight), _dense(x), out_dtype=dtype, bias=own, use_split_accumulator=exact
    )
    return y if bias is None or own is not None else y.add_(bias)


def te_dgrad(
    dy: Float[Tensor, "*rows out"], weight: Float[Tensor, "out k"]
) -> Float[Tensor, "*rows k"]:
    """Returns the gradient of the input, `dy W`, in the dtype of `dy`."""
    return library.general_gemm(
        _dense(weight),
        _dense(dy),
        out_dtype=dy.dtype,
        layout="NN",
        use_split_accumulator=True,
        grad=True,
    )


def te_wgrad(
    dy: Float[Tensor, "*rows out"],
    x: Float[Tensor, "*rows k"],
    into: Float[Tensor, "out k"] | None = None,
    *,
    first: bool = True,
) -> Float[Tensor, "out k"]:
    """Returns the gradient of the weight, `dy^T x`, or adds it to a matrix.

    Args:
        dy: Gradient of the output.
        x: Input.
        into: Contiguous matrix that is changed in place and returned, such as a main gradient in
            float32. Defaults to a new one in the dtype of `dy`.
        first: Whether `into` is overwritten.
    """
    return library.general_gemm(
        _dense(x),
        _dense(dy),
        out_dtype=dy.dtype if into is None else into.dtype,
        layout="NT",
        out=into,
        accumulate=into is not None and not first,
        use_split_accumulator=True,
        grad=True,
    )


def is_quantized(x: Tensor) -> bool:
    """Returns whether a tensor is one of Transformer Engine's quantized tensors."""
    return type(x) is not Tensor and isinstance(x, library.modules().QuantizedTensor)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the operation `linear`, with gradients by the same library."""
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def linear_unsupported_reason(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Returns why Transformer Engine does not support these arguments."""
    others = (each for each in (weight, bias) if each is not None)
    return library.te_unsupported_reason(x, *others)


def _dense(x: Tensor) -> Tensor:
    return x if is_quantized(x) else x.contiguous()


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return te_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, weight.shape[0])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            te_dgrad(dy, weight).view(x.shape) if of_x else None,
            te_wgrad(dy, x.reshape(-1, x.shape[-1])) if of_weight else None,
            dy.sum(0) if of_bias else None,
        )
