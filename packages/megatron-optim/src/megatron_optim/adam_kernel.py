"""The Triton kernel of `megatron_optim.triton_adam`. Importing this module imports Triton.

Each program updates a chunk of one tensor. It finds the tensor, and where the chunk begins, in two
tables, so that one launch updates tensors of any sizes. Everything is computed in fp32 but for the
two bias corrections, which are found in float64 from the number of the step.
"""

from collections.abc import Collection, Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_optim.address_tables import CHUNK, Tables

_BLOCK: Final = 1024
"""Elements that a program updates at once: 8 in each of 128 threads."""


@triton.jit
def _moved(mean, value, weight, FROM_VALUE: tl.constexpr):
    """Returns a running mean after a value, with weights that sum to 1 also after rounding.

    It is computed from the end with the larger weight. ``weight`` is that of the other end.
    """
    if FROM_VALUE:
        return value + weight * (mean - value)
    return mean + weight * (value - mean)


@triton.jit
def _bfloat16(x):
    """Returns the bits of numbers in bf16, to the nearest, ties to even; NaN stays NaN.

    Triton's interpreter cuts numbers off when it converts them, so the bits are computed.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _update(
    GRADIENT, PARAMETER, MEAN, SQUARE, ROUNDED, at, inside, form, divisor,
    step_size, scale, decay, eps, weight1, weight2,
    DIVIDES: tl.constexpr, DECOUPLED: tl.constexpr, FROM_VALUE1: tl.constexpr,
    FROM_VALUE2: tl.constexpr, TO_BFLOAT16: tl.constexpr, TO_FLOAT16: tl.constexpr,
):  # fmt: skip
    """Updates elements; all of them if ``inside`` is None."""
    gradient = tl.load(GRADIENT + at, mask=inside)
    parameter = tl.load(PARAMETER + at, mask=inside)
    mean = tl.load(MEAN + at, mask=inside)
    square = tl.load(SQUARE + at, mask=inside)
    if DIVIDES:
        gradient = tl.div_rn(gradient, tl.zeros_like(gradient) + divisor)
    if DECOUPLED:
        parameter -= decay * parameter
    else:
        gradient += decay * parameter
    mean = _moved(mean, gradient, weight1, FROM_VALUE1)
    new = gradient * gradient
    moved = _moved(square, new, weight2, FROM_VALUE2)
    # The difference of two infinite numbers is NaN.
    square = tl.where(tl.maximum(square, new) == float("inf"), float("inf"), moved)
    parameter -= tl.div_rn(step_size * mean, tl.sqrt_rn(square) * scale + eps)
    tl.store(PARAMETER + at, parameter, mask=inside)
    tl.store(MEAN + at, mean, mask=inside)
    tl.store(SQUARE + at, square, mask=inside)
    if TO_BFLOAT16 and form & 3 == 1:
        tl.store(ROUNDED + at, _bfloat16(parameter), mask=inside)
    if TO_FLOAT16 and form & 3 == 2:
        target = ROUNDED.to(tl.pointer_type(tl.float16), bitcast=True)
        tl.store(target + at, parameter.to(tl.float16), mask=inside)


@triton.jit
def _adam(
    TENSORS, CHUNKS, NUMBER, SKIP, DIVISOR,
    lr, decay, eps, weight1, weight2, log_beta1, log_beta2,
    DIVIDES: tl.constexpr, DECOUPLED: tl.constexpr, FROM_VALUE1: tl.constexpr,
    FROM_VALUE2: tl.constexpr, TO_BFLOAT16: tl.constexpr, TO_FLOAT16: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = CHUNKS + 2 * tl.program_id(0).to(tl.int64)
    tensor = TENSORS + 7 * tl.load(entry).to(tl.int64)
    start = tl.load(entry + 1).to(tl.int64) * CHUNK
    form = tl.load(tensor + 6)
    left = tl.minimum(tl.load(tensor + 5) - start, CHUNK).to(tl.int32)
    left = tl.where(tl.load(SKIP) == 1.0, 0, left)  # then nothing is loaded or stored
    GRADIENT = tl.load(tensor).to(tl.pointer_type(tl.float32)) + start
    PARAMETER = tl.load(tensor + 1).to(tl.pointer_type(tl.float32)) + start
    MEAN = tl.load(tensor + 2).to(tl.pointer_type(tl.float32)) + start
    SQUARE = tl.load(tensor + 3).to(tl.pointer_type(tl.float32)) + start
    ROUNDED = tl.load(tensor + 4).to(tl.pointer_type(tl.int16)) + start
    number = tl.load(NUMBER).to(tl.float64)
    correction1 = 1.0 - tl.exp(number * tl.cast(log_beta1, tl.float64))
    correction2 = 1.0 - tl.exp(number * tl.cast(log_beta2, tl.float64))
    step_size = (tl.cast(lr, tl.float64) / correction1).to(tl.float32)
    scale = (1.0 / tl.sqrt(correction2)).to(tl.float32)
    divisor = 1.0
    if DIVIDES:
        divisor = tl.load(DIVISOR)
    # Whole blocks at aligned addresses are loaded and stored 16 bytes at a time.
    whole = tl.where(form >= 4, left // BLOCK, 0)
    for block in range(whole):
        at = block * BLOCK + tl.arange(0, BLOCK)
        _update(
            tl.multiple_of(GRADIENT, 16), tl.multiple_of(PARAMETER, 16), tl.multiple_of(MEAN, 16),
            tl.multiple_of(SQUARE, 16), tl.multiple_of(ROUNDED, 8), at, None, form, divisor,
            step_size, scale, decay, eps, weight1, weight2,
            DIVIDES, DECOUPLED, FROM_VALUE1, FROM_VALUE2, TO_BFLOAT16, TO_FLOAT16,
        )  # fmt: skip
    for block in range(whole, tl.cdiv(left, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        _update(
            GRADIENT, PARAMETER, MEAN, SQUARE, ROUNDED, at, at < left, form, divisor,
            step_size, scale, decay, eps, weight1, weight2,
            DIVIDES, DECOUPLED, FROM_VALUE1, FROM_VALUE2, TO_BFLOAT16, TO_FLOAT16,
        )  # fmt: skip


def launch(
    tables: Tables,
    number: Tensor,
    skip: Tensor,
    divisor: Tensor | None,
    *,
    lr: float,
    decay: float,
    eps: float,
    betas: Sequence[float],
    logarithms: Sequence[float],
    decoupled: bool,
    dtypes: Collection[torch.dtype],
) -> None:
    """Launches the kernel on the current stream of the current device, which has the tables.

    Args:
        tables: The tables of the tensors.
        number: The number of the update, from 1: a float32 scalar on the device.
        skip: 1 if nothing must change, otherwise 0.
        divisor: The number that the gradients are divided by; None if they are not.
        lr: The learning rate.
        decay: The factor of the parameter that is subtracted from it if ``decoupled``, and
            otherwise added to the gradient.
        eps: The term added to the denominator.
        betas: The decay rates of both moments.
        logarithms: Their natural logarithms.
        decoupled: Whether weight decay is decoupled from the gradient.
        dtypes: The dtypes that parameters are rounded to.
    """
    flags = {f"FROM_VALUE{n}": beta < 0.5 for n, beta in enumerate(betas, 1)}
    _adam[(len(tables.chunks),)](
        tables.tensors, tables.chunks, number, skip, divisor,
        lr, decay, eps, *(min(beta, 1.0 - beta) for beta in betas), *logarithms,
        DIVIDES=divisor is not None, DECOUPLED=decoupled, **flags,
        TO_BFLOAT16=torch.bfloat16 in dtypes, TO_FLOAT16=torch.float16 in dtypes,
        CHUNK=CHUNK, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
