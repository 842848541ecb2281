"""Dropout whose mask does not depend on the layout.

An element is kept or dropped by a hash of where it stands: (seed, iteration, global sample, layer,
site, position, channel). Whoever holds the element computes the same answer, so tensor-parallel
ranks (which cut channels), sequence-parallel ones (positions) and data-parallel ones (samples) drop
what one rank would drop, recomputation drops what the forward pass dropped, and a resumed run goes
on as if it had not stopped. There is no generator and no state to save.

    key = DropoutKey.for_batch(seed=1234, iteration=7, samples=numbers, positions=4096)   # [s, b]
    x = keyed_dropout(x, 0.1, key, layer=3, site=1)                             # [s, b, h]
    y = keyed_dropout(y, 0.1, key, layer=3, site=2, channels=tp.index * width)  # [s, b, f/tp]
    z = keyed_dropout(z, 0.1, key.shard(tp), layer=3, site=3)                    # [s/tp, b, h]

The hash is integer arithmetic modulo 2^32: the mixer `triple32` found by C. Wellons' search ("hash
prospector", public domain), four xor-shifts with three multiplications between them, made a
function of 64 key bits by an exclusive or before the first xor-shift and one after the first
multiplication. The key of a (sample, position) is the same function chained over seed, iteration,
sample and position; layer and site enter as two constants. The hash is part of the format: changing
it changes every training curve.

Only the key, two 32-bit words for each (sample, position), is kept for the backward pass, which
computes the mask again. Compiled, hash and product are one loop over the elements.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

_WORD: Final = 2**32
_MULTIPLIERS: Final = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)  # triple32
_SHIFTS: Final = (17, 11, 15, 14)
_START: Final = (0x243F6A88, 0x85A308D3)  # first digits of pi
_SITES: Final = (0x13198A2E, 0x03707344)  # the next ones
_PIECE: Final = 2**18  # elements


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """Where the samples and positions of a micro-batch stand, as two words of hash for each.

    Made by `for_batch`, once for each micro-batch and outside of compiled code. Cheap: 8 bytes for
    each token.

    Attributes:
        word0: `[s, b]`, int32.
        word1: `[s, b]`, int32.
    """

    word0: Int32[Tensor, "s b"]
    word1: Int32[Tensor, "s b"]

    @classmethod
    def for_batch(
        cls,
        *,
        seed: int,
        iteration: int,
        samples: Int[Tensor, " b"],
        positions: int | Int[Tensor, " s"],
    ) -> "DropoutKey":
        """Returns the key of one micro-batch.

        Args:
            seed: Of the run; its lowest 64 bits count.
            iteration: Number of the step; its lowest 64 bits count.
            samples: Number of each sample, for instance in the global batch: the same for every
                layout, whichever rank and micro-batch it falls to.
            positions: Place of each token in its sequence, not in its document; a number `s` stands
                for `0 ... s - 1`.
        """
        if isinstance(positions, int):
            positions = torch.arange(positions, device=samples.device)
        return cls.for_tokens(seed, iteration, samples[None], positions[:, None])

    @classmethod
    def for_tokens(
        cls,
        seed: int,
        iteration: int,
        samples: Int[Tensor, "#s #b"],
        positions: Int[Tensor, "#s #b"],
    ) -> "DropoutKey":
        """Returns the key of tokens that may come from any samples; see `for_batch`."""
        device = samples.device
        words = tuple(torch.tensor(_signed(word), dtype=torch.int32) for word in _START)
        for number in (seed, iteration):
            for shift in (0, 32):
                word = torch.tensor(_signed(number >> shift), dtype=torch.int32)
                words = _absorb(words[0], words[1], word)
        word0, word1 = (word.to(device, non_blocking=True) for word in words)
        for word in (_low(samples), _low(samples >> 32), _low(positions)):
            word0, word1 = _absorb(word0, word1, word)
        return cls(word0, word1)

    def shard(self, axis: Axis) -> "DropoutKey":
        """Returns the key of this rank's part of the sequence, as sequence parallelism cuts it."""
        length = self.word0.shape[0]
        if length % axis.size:
            raise LayoutError(
                f"a sequence of {length} cannot be cut into {axis.size} equal parts "
                f"over axis {axis.name!r}"
            )
        start = length // axis.size * axis.index
        return self.narrow(start, start + length // axis.size)

    def select(self, indices: Int[Tensor, "#b part"]) -> "DropoutKey":
        """Returns the key of the tokens at `indices`, as context parallelism cuts the sequence."""
        rows = indices.t().expand(-1, self.word0.shape[1])
        return DropoutKey(self.word0.gather(0, rows), self.word1.gather(0, rows))

    def narrow(self, start: int, stop: int) -> "DropoutKey":
        """Returns the key of rows `start <= i < stop` of the sequence."""
        return DropoutKey(self.word0[start:stop], self.word1[start:stop])


def keyed_dropout(
    x: Float[Tensor, "s b *channels"],
    p: float,
    key: DropoutKey,
    *,
    layer: int,
    site: int,
    channels: int | Int[Tensor, "..."] = 0,
) -> Float[Tensor, "s b *channels"]:
    """Zeros a fraction `p` of the elements and multiply the others by `1 / (1 - p)`.

    Sequence first, then the micro-batch: attention probabilities `[b, n, s, t]` are handed in as a
    permuted view. With `p=0` it returns `x` itself. It can be differentiated once.

    Args:
        x: `[s, b, ...]`; whatever follows `[s, b]` are channels, numbered row by row.
        p: Probability of dropping an element, `0 <= p < 1`.
        key: Of the same `[s, b]`.
        layer: Global number of the layer.
        site: Number of the place in the layer, different for each call of `keyed_dropout`.
        channels: Global number of the first channel, where a rank holds one range of them; or the
            numbers of all, in a shape that broadcasts to that of the channels.

    Raises:
        LayoutError: A probability out of range, or a key of another shape.
    """
    if not 0.0 <= p < 1.0:
        raise LayoutError(f"dropout probability {p} is not in 0 <= p < 1")
    if p == 0.0:
        return x
    _require_shape(x.shape, key)
    result: Tensor = _Dropout.apply(  # type: ignore[no-untyped-call]
        x, key.word0, key.word1, _numbers(x, channels), p, layer, site
    )
    return result


def keep_mask(
    shape: tuple[int, ...],
    p: float,
    key: DropoutKey,
    *,
    layer: int,
    site: int,
    channels: int | Int[Tensor, "..."] = 0,
) -> Bool[Tensor, "s b *channels"]:
    """Returns the mask that `keyed_dropout` applies to a tensor of `shape`: True where it keeps."""
    _require_shape(shape, key)
    numbers = _numbers(torch.empty(shape, device="meta"), channels).to(key.word0.device)
    return _keep(key.word0, key.word1, numbers, p, layer, site)


class _Dropout(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        word0: Tensor,
        word1: Tensor,
        channels: Tensor,
        p: float,
        layer: int,
        site: int,
    ) -> Tensor:
        ctx.save_for_backward(word0, word1, channels)
        ctx.place = p, layer, site
        return _drop(x, word0, word1, channels, p, layer, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _drop(grads[0], *ctx.saved_tensors, *ctx.place)
        return gradient, None, None, None, None, None, None


def _drop(
    x: Tensor, word0: Tensor, word1: Tensor, channels: Tensor, p: float, layer: int, site: int
) -> Tensor:
    """Scaled `x` with zeros; in pieces that fit into a CPU's cache, where nothing fuses loops."""
    place = (p, layer, site)
    if torch.compiler.is_compiling():
        # Not in place: torch 2.11 compiles what was changed in place to a result without gradient.
        dropped = _keep(word0, word1, channels, *place).logical_not()
        return torch.mul(x, 1.0 / (1.0 - p)).masked_fill(dropped, 0.0)
    result = torch.empty_like(x)
    if x.device.type != "cpu":
        return _drop_into(result, x, word0, word1, channels, *place)
    rows = max(1, _PIECE // max(1, x[:1].numel()))
    for start in range(0, len(x), rows):
        here = slice(start, start + rows)
        _drop_into(result[here], x[here], word0[here], word1[here], channels, *place)
    return result


def _drop_into(
    result: Tensor,
    x: Tensor,
    word0: Tensor,
    word1: Tensor,
    channels: Tensor,
    p: float,
    layer: int,
    site: int,
) -> Tensor:
    dropped = _keep(word0, word1, channels, p, layer, site).logical_not_()
    return torch.mul(x, 1.0 / (1.0 - p), out=result).masked_fill_(dropped, 0.0)


def _keep(
    word0: Tensor, word1: Tensor, channels: Tensor, p: float, layer: int, site: int
) -> Tensor:
    """Hashes each element and compare with `p`, as if the words were fractions of 2^32."""
    rows = (..., *(None,) * channels.dim())
    key0 = (word0 + _signed(_bits_of(layer, _SITES[0], site)))[rows]
    key1 = (word1 ^ _signed(_bits_of(site, _SITES[1], layer)))[rows]
    # Words are signed: smallest is -2^31.
    return _bits(channels, key0, key1) >= round(p * _WORD) - _WORD // 2


def _numbers(x: Tensor, channels: int | Tensor) -> Tensor:
    """Numbers of the channels of `x`, int32 modulo 2^32."""
    if isinstance(channels, Tensor):
        return _low(channels)
    shape = x.shape[2:]
    device = None if x.device.type == "meta" else x.device
    numbers = torch.arange(shape.numel(), dtype=torch.int32, device=device)
    return (numbers + _signed(channels)).view(shape)


def _require_shape(shape: tuple[int, ...], key: DropoutKey) -> None:
    if shape[:2] != key.word0.shape:
        raise LayoutError(
            f"dropout of shape {tuple(shape)} with a key for {tuple(key.word0.shape)}: the first "
            "two dims are sequence and micro-batch"
        )


# -- arithmetic modulo 2^32 --------------------------------------------------------------------


def _bits(number: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """32 bits of hash of `number` under a key of 64 bits; int32, the keys of one shape."""
    z = number ^ key0
    shifted = torch.empty_like(z)
    _xor_shift(z, _SHIFTS[0], shifted).mul_(_signed(_MULTIPLIERS[0])).bitwise_xor_(key1)
    _xor_shift(z, _SHIFTS[1], shifted).mul_(_signed(_MULTIPLIERS[1]))
    _xor_shift(z, _SHIFTS[2], shifted).mul_(_signed(_MULTIPLIERS[2]))
    return _xor_shift(z, _SHIFTS[3], shifted)


def _xor_shift(z: Tensor, by: int, shifted: Tensor) -> Tensor:
    """`z ^= z >> by` in place; torch shifts the sign in, which the mask takes out again."""
    torch.bitwise_right_shift(z, by, out=shifted)
    return z.bitwise_xor_(shifted.bitwise_and_(2 ** (32 - by) - 1))


def _bits_of(number: int, key0: int, key1: int) -> int:
    """Returns the same as `_bits`, of plain numbers below 2^32."""
    z = (number ^ key0) % _WORD
    z = (z ^ z >> _SHIFTS[0]) * _MULTIPLIERS[0] % _WORD ^ key1 % _WORD
    z = (z ^ z >> _SHIFTS[1]) * _MULTIPLIERS[1] % _WORD
    z = (z ^ z >> _SHIFTS[2]) * _MULTIPLIERS[2] % _WORD
    return z ^ z >> _SHIFTS[3]


def _absorb(word0: Tensor, word1: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the key that continues a key with one more number."""
    return _bits(number, word0, word1), _bits(~number, word1, word0)


def _signed(number: int) -> int:
    """Returns the int32 that has the lowest 32 bits of `number`."""
    return (number + _WORD // 2) % _WORD - _WORD // 2


def _low(numbers: Tensor) -> Tensor:
    """Returns the lowest 32 bits of integers, as int32."""
    return numbers if numbers.dtype == torch.int32 else numbers.to(torch.int64).to(torch.int32)
