"""Dropout with masks that are the same for every layout.

Whether an element is dropped is a hash of (seed, iteration, global sample, layer, site, position,
channel). Each rank computes the same hash for an element, so tensor-parallel ranks (which cut
channels), sequence-parallel ranks (positions) and data-parallel ranks (samples) drop the same
elements as a single rank. Recomputation drops the same elements as the forward pass, and a resumed
run continues as if it had not stopped. There is no generator and no state to save.

    key = DropoutKey.for_batch(seed=1234, iteration=7, samples=numbers, positions=4096)   # [s, b]
    x = keyed_dropout(x, 0.1, key, layer=3, site=1)                             # [s, b, h]
    y = keyed_dropout(y, 0.1, key, layer=3, site=2, channels=tp.index * width)  # [s, b, f/tp]
    z = keyed_dropout(z, 0.1, key.shard(tp), layer=3, site=3)                   # [s/tp, b, h]

The hash is integer arithmetic modulo 2^32. It is the mixer `triple32`, found by the search of
C. Wellons ("hash prospector", public domain): four xor-shifts with three multiplications between
them. An exclusive or before the first xor-shift and one after the first multiplication make it a
function of 64 key bits. The key of a (sample, position) is the same function chained over seed,
iteration, sample and position; layer and site enter as two constants. The hash is part of the
format: changing it changes every training curve.

Only the key, two 32-bit words for each (sample, position), is saved for the backward pass, which
computes the mask again. In compiled code, hash and product are one loop over the elements.
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
_SLICE: Final = 2**18  # elements


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """Hashes of the samples and positions of a micro-batch, two words for each token.

    Built by `for_batch`, once per micro-batch and outside compiled code. Takes 8 bytes per token.

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
            seed: Seed of the run, of which the lowest 64 bits are used.
            iteration: Index of the step, of which the lowest 64 bits are used.
            samples: Index of each sample, for example in the global batch. Must be the same for
                every layout.
            positions: Index of each token in its sequence, not in its document. A number `s` means
                `0 ... s - 1`.
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
        """Returns the key of tokens that may come from any samples. See `for_batch`."""
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
        """Returns the key of this rank's part of the sequence under sequence parallelism.

        Raises:
            LayoutError: The axis size does not divide the length of the sequence.
        """
        length = self.word0.shape[0]
        if length % axis.size:
            raise LayoutError(
                f"a sequence of {length} cannot be cut into {axis.size} equal parts "
                f"over axis {axis.name!r}"
            )
        start = length // axis.size * axis.index
        return self.narrow(start, start + length // axis.size)

    def select(self, indices: Int[Tensor, "#b part"]) -> "DropoutKey":
        """Returns the key of the tokens at `indices`, for context parallelism."""
        rows = indices.t().expand(-1, self.word0.shape[1])
        return DropoutKey(self.word0.gather(0, rows), self.word1.gather(0, rows))

    def narrow(self, start: int, stop: int) -> "DropoutKey":
        """Returns the key of the tokens with index `start <= i < stop` in the sequence."""
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
    """Zeros elements with probability `p` and multiplies the others by `1 / (1 - p)`.

    Returns `x` itself if `p` is 0. Can be differentiated once.

    Args:
        x: `[s, b, ...]`. All dims after `[s, b]` are channels, indexed in row-major order.
            Attention probabilities `[b, n, s, t]` are passed as a permuted view.
        p: Probability of dropping an element, `0 <= p < 1`.
        key: Key of the same `[s, b]`.
        layer: Global index of the layer.
        site: Index of the call of `keyed_dropout` in the layer.
        channels: Global index of the first channel, if this rank holds one range of channels; or
            the indices of all channels, in a shape that broadcasts to that of the channels.

    Raises:
        LayoutError: `p` is out of range, or the key has another shape.
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
    """Returns the mask of `keyed_dropout` for a tensor of `shape`; True for elements it keeps."""
    _require_shape(shape, key)
    numbers = _numbers(torch.empty(shape, device="meta"), channels).to(key.word0.device)
    return _keep(key.word0, key.word1, numbers, p, layer, site)


def keyed_uniform(
    shape: tuple[int, ...],
    key: DropoutKey,
    *,
    layer: int,
    site: int,
    dtype: torch.dtype,
    channels: int | Int[Tensor, "..."] = 0,
) -> Float[Tensor, "s b *channels"]:
    """Returns noise, uniform between 0 and 1, which is the same for every layout.

    Args:
        shape: Shape ``[s, b, ...]`` of the result.
        key: Key of the same `[s, b]`.
        layer: Global index of the layer.
        site: Index of the call in the layer, other than those of `keyed_dropout`.
        dtype: Data type of the result, float32 or float64.
        channels: Global index of the first channel, or the indices of all channels.

    Raises:
        LayoutError: The key has another shape.
    """
    _require_shape(shape, key)
    numbers = _numbers(torch.empty(shape, device="meta"), channels).to(key.word0.device)
    bits = _element_bits(key.word0, key.word1, numbers, layer, site)
    return (bits.to(dtype) + _WORD // 2) / _WORD


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
        ctx.options = p, layer, site
        return _drop(x, word0, word1, channels, p, layer, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _drop(grads[0], *ctx.saved_tensors, *ctx.options)
        return gradient, None, None, None, None, None, None


def _drop(
    x: Tensor, word0: Tensor, word1: Tensor, channels: Tensor, p: float, layer: int, site: int
) -> Tensor:
    """Returns the scaled `x` with zeros. On a CPU, in slices that fit into the cache."""
    options = (p, layer, site)
    if torch.compiler.is_compiling():
        # Not in place: torch 2.11 compiles in-place changes to a result without gradient.
        dropped = _keep(word0, word1, channels, *options).logical_not()
        return torch.mul(x, 1.0 / (1.0 - p)).masked_fill(dropped, 0.0)
    result = torch.empty_like(x)
    if x.device.type != "cpu":
        return _drop_into(result, x, word0, word1, channels, *options)
    rows = max(1, _SLICE // max(1, x[:1].numel()))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        _drop_into(result[part], x[part], word0[part], word1[part], channels, *options)
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
    """Returns whether the hash of each element, as a fraction of 2^32, is at least `p`."""
    # Words are signed; the smallest is -2^31.
    return _element_bits(word0, word1, channels, layer, site) >= round(p * _WORD) - _WORD // 2


def _element_bits(word0: Tensor, word1: Tensor, channels: Tensor, layer: int, site: int) -> Tensor:
    """Returns the hash of each element, as int32."""
    rows = (..., *(None,) * channels.dim())
    key0 = (word0 + _signed(_bits_of(layer, _SITES[0], site)))[rows]
    key1 = (word1 ^ _signed(_bits_of(site, _SITES[1], layer)))[rows]
    return _bits(channels, key0, key1)


def _numbers(x: Tensor, channels: int | Tensor) -> Tensor:
    """Returns the indices of the channels of `x`, int32 modulo 2^32."""
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
            "two dims must be sequence and micro-batch"
        )


# -- arithmetic modulo 2^32 --------------------------------------------------------------------


def _bits(number: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """Returns a 32-bit hash of `number` under a key of 64 bits, as int32."""
    z = number ^ key0
    shifted = torch.empty_like(z)
    _xor_shift(z, _SHIFTS[0], shifted).mul_(_signed(_MULTIPLIERS[0])).bitwise_xor_(key1)
    _xor_shift(z, _SHIFTS[1], shifted).mul_(_signed(_MULTIPLIERS[1]))
    _xor_shift(z, _SHIFTS[2], shifted).mul_(_signed(_MULTIPLIERS[2]))
    return _xor_shift(z, _SHIFTS[3], shifted)


def _xor_shift(z: Tensor, by: int, shifted: Tensor) -> Tensor:
    """Computes `z ^= z >> by` in place. The mask removes the sign bits that torch shifts in."""
    torch.bitwise_right_shift(z, by, out=shifted)
    return z.bitwise_xor_(shifted.bitwise_and_(2 ** (32 - by) - 1))


def _bits_of(number: int, key0: int, key1: int) -> int:
    """Returns the same as `_bits`, for Python integers below 2^32."""
    z = (number ^ key0) % _WORD
    z = (z ^ z >> _SHIFTS[0]) * _MULTIPLIERS[0] % _WORD ^ key1 % _WORD
    z = (z ^ z >> _SHIFTS[1]) * _MULTIPLIERS[1] % _WORD
    z = (z ^ z >> _SHIFTS[2]) * _MULTIPLIERS[2] % _WORD
    return z ^ z >> _SHIFTS[3]


def _absorb(word0: Tensor, word1: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the key that extends a key by one more number."""
    return _bits(number, word0, word1), _bits(~number, word1, word0)


def _signed(number: int) -> int:
    """Returns the lowest 32 bits of `number` as a signed number."""
    return (number + _WORD // 2) % _WORD - _WORD // 2


def _low(numbers: Tensor) -> Tensor:
    """Returns the lowest 32 bits of integers, as int32."""
    return numbers if numbers.dtype == torch.int32 else numbers.to(torch.int64).to(torch.int32)
