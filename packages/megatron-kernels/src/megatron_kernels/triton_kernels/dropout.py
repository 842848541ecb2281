"""Bias, dropout by a hash of each element, and addition to the residual stream, in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    ELEMENTS,
    accumulator,
    elementwise_grid,
    exact,
    two_floats,
)


@triton.jit
def folded(word, BY: tl.constexpr):
    """Returns `z ^ z >> BY`, a step of the hash; that of `a ^ b` is that of `a` ^ that of `b`."""
    z = word.to(tl.uint32, bitcast=True)
    return z ^ (z >> BY)


@triton.jit
def hashed(z, key1):
    """Returns the hash of `bias_dropout_add`, modulo 2^32.

    ``z`` is `number ^ key0`, folded by 17, and ``key1`` the second word of the key, folded by 11.
    """
    z = z * 0xED5AD4BB
    z = (z ^ (z >> 11) ^ key1) * 0xAC4C1B51
    z = (z ^ (z >> 15)) * 0x31848BAB
    return (z ^ (z >> 14)).to(tl.int32, bitcast=True)


@triton.jit
def _dropout(
    X, BIAS, RESIDUAL, WORD0, WORD1, OUT, h, site0, site1, least, scale, rest,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(h, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < h
    at = token * h + channel
    x = tl.load(X + at, mask=inside).to(ACC)
    if HAS_BIAS:
        x += tl.load(BIAS + channel, mask=inside).to(ACC)
    key0 = tl.load(WORD0 + token) + site0
    key1 = tl.load(WORD1 + token) ^ site1
    bits = hashed(folded(channel ^ key0.to(tl.int32), 17), folded(key1.to(tl.int32), 11))
    x = tl.where(bits < least, 0.0, x * exact(scale, rest, ACC))
    if ADDS:
        x += tl.load(RESIDUAL + at, mask=inside).to(ACC)
    tl.store(OUT + at, x, mask=inside)


def dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    word0: Tensor,
    word1: Tensor,
    site0: int,
    site1: int,
    least: int,
    scale: float,
) -> Tensor:
    """Returns `residual + dropout(x + bias)`."""
    out = torch.empty_like(x)
    if x.numel():
        _dropout[elementwise_grid(x, x.shape[-1])](
            x, bias, residual, word0, word1, out, x.shape[-1], site0, site1, least,
            *two_floats(scale), HAS_BIAS=bias is not None, ADDS=residual is not None,
            ACC=accumulator(x.dtype), BLOCK=ELEMENTS,
        )  # fmt: skip
    return out
