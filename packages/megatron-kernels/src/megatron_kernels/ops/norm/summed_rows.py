"""LayerNorm on a CPU in 16 bits, with gradients of gain and shift that are summed in float32.

torch's kernel adds the rows in 16 bits (torch 2.13): of 10,000 ones the gradient of the
shift is 256 in bfloat16, since 256 + 1 rounds to 256. Compiled code and CUDA kernels add in
float32.
"""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_kernels.ops.norm.gain import gain_of
from megatron_kernels.ops.precision import upcast

_ELEMENTS: Final = 2**18
"""Elements of a slice of rows in the backward pass, whose float32 copies fit into the cache."""


def sums_rows_in_16_bits(x: Tensor) -> bool:
    """Returns whether torch's backward pass of LayerNorm adds up rows of `x` in 16 bits."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float16)
        and not torch.compiler.is_compiling()
    )


def layer_norm(
    x: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    bias: Float[Tensor, " h"] | None,
    eps: float,
    zero_centered: bool,
) -> Float[Tensor, "*rows h"]:
    """Computes LayerNorm by torch's kernels for 16-bit rows with a gain and a shift in float32.

    Saves `x`, the parameters, and two float32 numbers for each row.
    """
    result: Tensor = _LayerNorm.apply(x, weight, bias, eps, zero_centered)  # type: ignore[no-untyped-call]
    return result


def _in_float32(
    weight: Tensor, bias: Tensor | None, zero_centered: bool
) -> tuple[Tensor, Tensor | None]:
    return gain_of(upcast(weight), zero_centered), None if bias is None else upcast(bias)


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
    ) -> Tensor:
        gain, shift = _in_float32(weight, bias, zero_centered)
        y, mean, rstd = torch.native_layer_norm(x, gain.shape, gain, shift, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.zero_centered = zero_centered
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        gain, shift = _in_float32(weight, bias, ctx.zero_centered)
        mask = list(ctx.needs_input_grad[:3])
        rows, dy = (each.reshape(-1, len(gain)) for each in (x, grads[0]))
        means, scales = mean.reshape(-1, 1), rstd.reshape(-1, 1)
        of_rows = torch.empty_like(rows) if mask[0] else None
        sums = [torch.zeros_like(gain) if wanted else None for wanted in mask[1:]]
        step = max(1, _ELEMENTS // len(gain))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            found = torch.ops.aten.native_layer_norm_backward(
                dy[part].float(),
                rows[part].float(),
                gain.shape,
                means[part],
                scales[part],
                gain,
                shift,
                mask,
            )
            if of_rows is not None:
                of_rows[part] = found[0]
            for total, added in zip(sums, found[1:], strict=True):
                if total is not None:
                    total.add_(added)
        of_gain, of_shift = (None if total is None else total.to(weight.dtype) for total in sums)
        return None if of_rows is None else of_rows.view_as(x), of_gain, of_shift, None, None
