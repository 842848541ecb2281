"""Norms by the kernels of Transformer Engine that its own modules call.

With a quantizer, the output is the quantized input of a linear layer, as in its `LayerNormLinear`:
for the scalings `delayed` and `tensorwise` its kernels write FP8 without a norm in between, or with
its largest magnitude found on the way.
"""

from typing import Any, Final

from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.transformer_engine import library

_ALL_MULTIPROCESSORS: Final = 0


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Calls the kernels of LayerNorm."""
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps, zero_centered, None)  # type: ignore[no-untyped-call]
    return y


def layer_norm_unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> str | None:
    """Returns why Transformer Engine does not support these arguments."""
    return "needs a bias" if bias is None else library.te_unsupported_reason(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Calls the kernels of RMSNorm."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered, None)  # type: ignore[no-untyped-call]
    return y


def rms_norm_unsupported_reason(x: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    """Returns why Transformer Engine does not support these arguments."""
    return "needs a gain" if weight is None else library.te_unsupported_reason(x, weight)


def te_quantized_norm(
    x: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    bias: Float[Tensor, " h"] | None,
    eps: float,
    zero_centered: bool,
    quantizer: Any,
) -> Tensor:
    """Returns the norm of the last dim as a quantized tensor, LayerNorm or without a bias RMSNorm.

    Its dtype is that of the input, and its gradient that of the norm.

    Args:
        x: Input.
        weight: Gain.
        bias: Shift, or None.
        eps: Added to the variance or the mean square.
        zero_centered: Whether the gain is `1 + weight`.
        quantizer: Quantizer of a `TransformerEngineRecipe`.

    Raises:
        KernelError: Transformer Engine does not support the tensors.
    """
    y: Tensor
    if bias is None:
        y = _RMSNorm.apply(x, weight, eps, zero_centered, quantizer)  # type: ignore[no-untyped-call]
    else:
        y = _LayerNorm.apply(x, weight, bias, eps, zero_centered, quantizer)  # type: ignore[no-untyped-call]
    return y


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        zero_centered: bool,
        quantizer: Any,
    ) -> Tensor:
        kernels, dtypes = library.kernels()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = None
        y, mean, inverse = kernels.layernorm_fwd(
            rows,
            weight,
            bias,
            eps,
            out,
            quantizer,
            dtypes[x.dtype],
            _ALL_MULTIPROCESSORS,
            zero_centered,
        )
        ctx.save_for_backward(rows, mean, inverse, weight)
        ctx.zero_centered = zero_centered
        normed: Tensor = y.view(x.shape)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, mean, inverse, weight = ctx.saved_tensors
        dy = grads[0].reshape(rows.shape).contiguous()
        dx, dweight, dbias = library.kernels()[0].layernorm_bwd(
            dy, rows, mean, inverse, weight, _ALL_MULTIPROCESSORS, ctx.zero_centered
        )
        return dx.view(grads[0].shape), dweight, dbias, None, None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, quantizer: Any
    ) -> Tensor:
        kernels, dtypes = library.kernels()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = None
        y, _, inverse = kernels.rmsnorm_fwd(
            rows,
            weight,
            eps,
            out,
            quantizer,
            dtypes[x.dtype],
            _ALL_MULTIPROCESSORS,
            zero_centered,
        )
        ctx.save_for_backward(rows, inverse, weight)
        ctx.zero_centered = zero_centered
        normed: Tensor = y.view(x.shape)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, inverse, weight = ctx.saved_tensors
        dy = grads[0].reshape(rows.shape).contiguous()
        dx, dweight = library.kernels()[0].rmsnorm_bwd(
            dy, rows, inverse, weight, _ALL_MULTIPROCESSORS, ctx.zero_centered
        )
        return dx.view(grads[0].shape), dweight, None, None, None
