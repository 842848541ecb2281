"""A hash of 32 bits under keys of 64 bits, in integer arithmetic modulo 2^32.

It is the mixer `triple32`, found by the search of C. Wellons ("hash prospector", public domain):
four xor-shifts with three multiplications between them. An exclusive or before the first xor-shift
and one after the first multiplication make it a function of 64 key bits.
"""

from typing import Any, Final

import torch
from torch import Tensor

WORD: Final = 2**32
_MULTIPLIERS: Final = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)  # triple32
_SHIFTS: Final = (17, 11, 15, 14)


def bits(number: Tensor, key0: Tensor | int, key1: Tensor | int) -> Tensor:
    """Returns a 32-bit hash of `number` under a key of 64 bits, as int32."""
    # An xor-shift of an exclusive or is that of both operands, which are smaller if they broadcast.
    if isinstance(key0, Tensor):
        key0 = folded(key0)
    else:
        key0 = signed(key0 % WORD ^ key0 % WORD >> _SHIFTS[0])
    return mixed(folded(number) ^ key0, key1)


def folded(word: Tensor) -> Tensor:
    """Returns the first xor-shift of a word."""
    folded: Tensor = word ^ (word >> _SHIFTS[0] & 2 ** (32 - _SHIFTS[0]) - 1)
    return folded


def mixed(z: Tensor, key1: Tensor | int) -> Tensor:
    """Computes the rest of the hash in place."""
    shifted = torch.empty_like(z)
    z.mul_(signed(_MULTIPLIERS[0])).bitwise_xor_(key1)
    _xor_shift(z, _SHIFTS[1], shifted).mul_(signed(_MULTIPLIERS[1]))
    _xor_shift(z, _SHIFTS[2], shifted).mul_(signed(_MULTIPLIERS[2]))
    return _xor_shift(z, _SHIFTS[3], shifted)


def _xor_shift(z: Tensor, by: int, shifted: Tensor) -> Tensor:
    """Computes `z ^= z >> by` in place. The mask removes the sign bits that torch shifts in."""
    torch.bitwise_right_shift(z, by, out=shifted)
    return z.bitwise_xor_(shifted.bitwise_and_(2 ** (32 - by) - 1))


def bits_of(number: Any, key0: Any, key1: Any) -> Any:
    """Returns the same as `bits`, modulo 2^32, for Python integers or tensors of int64."""
    z = (number ^ key0) % WORD
    z = _product(z ^ z >> _SHIFTS[0], _MULTIPLIERS[0]) ^ key1 % WORD
    z = _product(z ^ z >> _SHIFTS[1], _MULTIPLIERS[1])
    z = _product(z ^ z >> _SHIFTS[2], _MULTIPLIERS[2])
    return z ^ z >> _SHIFTS[3]


def _product(z: Any, factor: int) -> Any:
    """Returns a product modulo 2^32, by halves, so that it fits into int64."""
    return ((z & 0xFFFF) * factor + ((z >> 16) * factor % WORD << 16)) % WORD


def signed(number: Any) -> Any:
    """Returns the lowest 32 bits of `number` as a signed number."""
    return (number + WORD // 2) % WORD - WORD // 2


def low(numbers: Tensor) -> Tensor:
    """Returns the lowest 32 bits of integers, as int32."""
    return numbers if numbers.dtype == torch.int32 else numbers.to(torch.int64).to(torch.int32)
