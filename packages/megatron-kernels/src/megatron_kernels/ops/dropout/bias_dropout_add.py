"""Bias, dropout and addition to the residual stream; the mask is a hash of each element."""

from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from megatron_kernels.ops.dropout import triton
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op

_LOW: Final = 2**32 - 1
_MULTIPLIERS: Final = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)  # triple32 of C. Wellons
_SHIFTS: Final = (17, 11, 15, 14)


class DropoutSite(NamedTuple):
    """What the calls of one site of one layer have in common.

    Attributes:
        word0: Added to the first word of the key, modulo 2^32; a signed 32-bit number.
        word1: Combined with the second word by exclusive or; a signed 32-bit number.
        least: Smallest hash that keeps an element, as a signed 32-bit number.
        scale: Factor of the elements that are kept, 1 / (1 - p).
    """

    word0: int
    word1: int
    least: int
    scale: float


def hashes(number: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """Returns the hash of each number under a key of 64 bits, as a signed 32-bit number."""
    z = (number ^ key0) & _LOW
    z = ((z ^ z >> _SHIFTS[0]) * _MULTIPLIERS[0] & _LOW) ^ (key1 & _LOW)
    z = (z ^ z >> _SHIFTS[1]) * _MULTIPLIERS[1] & _LOW
    z = (z ^ z >> _SHIFTS[2]) * _MULTIPLIERS[2] & _LOW
    z = z ^ z >> _SHIFTS[3]
    return (z + 2**31 & _LOW) - 2**31


def reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    word0: Tensor,
    word1: Tensor,
    site: DropoutSite,
) -> Tensor:
    """Computes the hash in 64-bit integers, and the sum in at least float32."""
    values = upcast(x) if bias is None else upcast(x) + upcast(bias)
    numbers = torch.arange(x.shape[-1], device=x.device)
    key0, key1 = word0.long() + site.word0, word1.long() ^ site.word1
    dropped = hashes(numbers, key0[..., None], key1[..., None]) < site.least
    return (upcast(residual) + torch.where(dropped, 0.0, values * site.scale)).to(x.dtype)


@op(
    triton_backend(
        triton.bias_dropout_add,
        triton.unsupported_reason,
        "one kernel of ours each way, saves the key",
    ),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def bias_dropout_add(
    x: Float[Tensor, "s b h"],
    bias: Float[Tensor, " h"] | None,
    residual: Float[Tensor, "s b h"],
    word0: Int32[Tensor, "s b"],
    word1: Int32[Tensor, "s b"],
    site: DropoutSite,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "s b h"]:
    """Computes `residual + dropout(x + bias)`.

    The mask is that of `megatron_parallel.keyed_dropout` with the same key: an element is dropped
    if the hash of its channel under the key of its token is less than a bound. It does not depend
    on the layout, and the backward pass computes it again.

    Args:
        x: What is added to the stream, `[s, b, h]`.
        bias: Its bias `[h]`, or None.
        residual: Residual stream `[s, b, h]`.
        word0: First words of the key of each token, `[s, b]`.
        word1: Second words of the key.
        site: Numbers of the site and the probability.
        backend: "auto" or the name of one backend.

    Returns:
        `[s, b, h]` in the dtype of `x`.
    """
    return bias_dropout_add.run(backend, x, bias, residual, word0, word1, site)
