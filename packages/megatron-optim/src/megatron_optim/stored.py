"""Values that are stored in fewer bits than they are updated in.

A rule updates fp32 copies, which `Stored.load` makes and `Stored.store` takes back:

- bf16 has the exponents of fp32, so that values are only rounded.
- fp16 and fp8 (E4M3) have fewer exponents. Blocks of 2,048 elements share a factor, a power of two
  that brings the largest of them near the end of the range.
- A main parameter of a bf16 parameter is that parameter and a remainder of 16 bits, together the
  exact fp32 number.
- Without a main parameter, a bf16 parameter is rounded up or down at random, with the probability
  that makes the expected value exact.

`store` after `load` changes nothing, so that a step that the device skips has no effect.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int8, Int32
from megatron_parallel import DropoutKey, View
from torch import Tensor

from megatron_optim.state_format_config import BLOCK, PRECISION_BITS, StateFormat


class _Code(NamedTuple):
    """A format with shared exponents: its dtype, an integer dtype of its size, and an exponent.

    Values of a block are less than 2 to the power of that exponent, which the dtype represents.
    """

    dtype: torch.dtype
    bits: torch.dtype
    top: int


_CODES = {
    "fp16": _Code(torch.float16, torch.int16, 15),
    "fp8": _Code(torch.float8_e4m3fn, torch.int8, 8),
}
_HIGH_BITS = -(2**16)
_ROUNDED_AT_ONCE = 2**20


class Part(NamedTuple):
    """A range of a flattened stored tensor. It begins at a multiple of `BLOCK`."""

    stored: Any
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the range of a flattened tensor of the same size."""
        return tensor.view(-1)[self.start : self.stop]


class Stored(ABC):
    """A tensor that is stored in another form than that of its updates.

    Several tensors of one class are loaded and stored at once, with a number of kernels that does
    not depend on their number.

    Attributes:
        shape: Its shape.
        cut: Whether ranges of it can be loaded and stored.
    """

    cut = True

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that take memory, without the model's parameters."""

    @staticmethod
    @abstractmethod
    def load(parts: Sequence[Part]) -> list[Float[Tensor, " n"]]:
        """Returns copies of ranges of tensors of this class, in fp32 or float64."""

    @staticmethod
    @abstractmethod
    def store(parts: Sequence[Part], values: Sequence[Float[Tensor, " n"]]) -> None:
        """Takes new values of ranges of tensors of this class."""

    def load_all(self) -> Float[Tensor, "..."]:
        """Returns a copy of all values, in their shape."""
        return self.load([Part(self, 0, self.numel)])[0].view(self.shape)

    def store_all(self, values: Float[Tensor, "..."]) -> None:
        """Takes new values."""
        self.store([Part(self, 0, self.numel)], [values.reshape(-1)])


class Rounded(Stored):
    """Values that are rounded to bf16.

    Args:
        like: A tensor of the shape and on the device of the values, which are 0.
        dtype: The dtype that they are updated in.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        super().__init__(like.shape)
        self.dtype = dtype
        self.values = torch.zeros(self.numel, dtype=torch.bfloat16, device=like.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The rounded values."""
        return (self.values,)

    @staticmethod
    def load(parts: Sequence[Part]) -> list[Float[Tensor, " n"]]:
        """Returns copies of ranges."""
        rounded = torch.cat([part.of(part.stored.values) for part in parts])
        return _split(rounded.to(parts[0].stored.dtype), parts)

    @staticmethod
    def store(parts: Sequence[Part], values: Sequence[Float[Tensor, " n"]]) -> None:
        """Rounds new values of ranges."""
        rounded = torch.cat([*values]).to(torch.bfloat16)
        torch._foreach_copy_([p.of(p.stored.values) for p in parts], _split(rounded, parts))


class Scaled(Stored):
    """Values in fp16 or fp8, with an exponent for each `BLOCK` of them.

    Args:
        like: A tensor of the shape and on the device of the values, which are 0.
        dtype: The dtype that they are updated in.
        format_name: ``fp16`` or ``fp8``.
        positive: Whether positive values must not be rounded to 0, because the rule divides by
            them. They are rounded up instead.
    """

    def __init__(
        self, like: Tensor, dtype: torch.dtype, format_name: StateFormat, positive: bool = False
    ) -> None:
        super().__init__(like.shape)
        self.dtype, self.format_name, self.positive = dtype, format_name, positive
        # Codes are integers here, which all operations support.
        self.codes = torch.zeros(self.numel, dtype=_CODES[format_name].bits, device=like.device)
        blocks = -(-self.numel // BLOCK)
        self.exponents = torch.zeros(blocks, dtype=torch.int8, device=like.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The codes and the exponents."""
        return self.codes, self.exponents

    @staticmethod
    def load(parts: Sequence[Part]) -> list[Float[Tensor, " n"]]:
        """Returns copies of ranges."""
        first: Scaled = parts[0].stored
        code = _CODES[first.format_name]
        flat, slots = _padded(parts, code.bits, first.codes.device)
        torch._foreach_copy_(slots, [part.of(part.stored.codes) for part in parts])
        exponents = torch.cat(_exponents(parts))
        values = flat.view(code.dtype).to(first.dtype).view(-1, BLOCK)
        return _slots(values.mul_(_power_of_two(exponents)[:, None]).view(-1), parts)

    @staticmethod
    def store(parts: Sequence[Part], values: Sequence[Float[Tensor, " n"]]) -> None:
        """Rounds new values of ranges."""
        first: Scaled = parts[0].stored
        code, bits = _CODES[first.format_name], PRECISION_BITS[first.format_name]
        flat, slots = _padded(parts, first.dtype, first.codes.device)
        torch._foreach_copy_(slots, [*values])
        blocks = flat.view(-1, BLOCK)
        # One unit in the last place may carry a value over the next power of two.
        largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1) * (1.0 + 2.0**-bits)
        exponents = torch.frexp(largest).exponent - code.top
        exponents = exponents.clamp(-100, 126).to(torch.int8)  # powers stay normal numbers
        blocks.mul_(_power_of_two(-exponents)[:, None])
        if first.positive:
            smallest = float(torch.finfo(code.dtype).smallest_normal) * 2.0 ** (1 - bits)
            flat = torch.where(flat > 0, flat.clamp(min=smallest), flat)
        codes = _slots(flat.to(code.dtype).view(code.bits), parts)
        torch._foreach_copy_([part.of(part.stored.codes) for part in parts], codes)
        targets = _exponents(parts)
        torch._foreach_copy_(targets, list(torch.split(exponents, [len(each) for each in targets])))


class Remainder(Stored):
    """A main parameter, as a bf16 parameter and the 16 bits that it lacks.

    The parameter is the main parameter rounded to the nearest bf16 number. Of two equally near
    numbers it is the one with the larger magnitude, because the even one would not tell on which
    side of it the main parameter is.

    Args:
        parameter: The parameter, whose values the main parameter has at first.
    """

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(parameter.shape)
        self.high = parameter.detach().view(-1).view(torch.int16)
        self.low = torch.zeros(self.numel, dtype=torch.int16, device=parameter.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The remainders."""
        return (self.low,)

    @staticmethod
    def load(parts: Sequence[Part]) -> list[Float32[Tensor, " n"]]:
        """Returns the exact values of ranges."""
        high = torch.cat([part.of(part.stored.high) for part in parts]).int()
        low = torch.cat([part.of(part.stored.low) for part in parts])
        return _split((high << 16).add_(low).view(torch.float32), parts)

    @staticmethod
    def store(parts: Sequence[Part], values: Sequence[Float[Tensor, " n"]]) -> None:
        """Takes new values of ranges, and rounds them into the parameters."""
        bits = torch.cat([*values]).view(torch.int32)
        high = nearest_high_bits(bits)
        low = (bits - (high << 16)).to(torch.int16)
        torch._foreach_copy_([part.of(part.stored.low) for part in parts], _split(low, parts))
        rounded = _split(high.to(torch.int16), parts)
        torch._foreach_copy_([part.of(part.stored.high) for part in parts], rounded)

    def reset(self) -> None:
        """Takes the values of the parameter, after weights were loaded."""
        self.low.zero_()


def nearest_high_bits(bits: Int32[Tensor, "*n"]) -> Int32[Tensor, "*n"]:
    """Returns the bits of the nearest bf16 numbers, as `Remainder` rounds fp32 numbers."""
    return (bits + 2**15) >> 16


class StochasticallyRounded(Stored):
    """A bf16 parameter without a main parameter.

    Rounding is random, by a hash of (seed, step, parameter, index of the element in the global
    tensor), so that it does not depend on the layout.

    Args:
        parameter: The parameter.
        views: Returns views of a tensor of the parameter's shape as boxes of the global tensor.
        number: A number that stands for the name of the parameter.
        key: Returns the hash of elements in the current step, for the numbers of their parameters
            and their indices.
    """

    cut = False

    def __init__(
        self,
        parameter: Tensor,
        views: Callable[[Tensor], list[View]],
        number: int,
        key: Callable[[Tensor, Tensor], Int32[Tensor, " n"]],
    ) -> None:
        super().__init__(parameter.shape)
        self.parameter = parameter.detach()
        self.views, self.number, self.key = views, number, key

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()

    @staticmethod
    def load(parts: Sequence[Part]) -> list[Float32[Tensor, " n"]]:
        """Returns copies of ranges."""
        rounded = torch.cat([part.of(part.stored.parameter) for part in parts])
        return _split(rounded.float(), parts)

    @staticmethod
    def store(parts: Sequence[Part], values: Sequence[Float[Tensor, " n"]]) -> None:
        """Rounds all new values at random."""
        boxes: list[Tensor] = []
        indices: list[Tensor] = []
        numbers: list[Tensor] = []
        waiting = 0
        for part, value in zip(parts, values, strict=True):
            for view in part.stored.views(value.view(part.stored.shape)):
                for box, first in _slices(view):
                    boxes.append(box)
                    indices.append(_global_index(view, first, len(box) if box.dim() else 1))
                    numbers.append(torch.full_like(indices[-1], part.stored.number))
                    waiting += box.numel()
                    if waiting >= _ROUNDED_AT_ONCE:
                        _round(boxes, part.stored.key(torch.cat(numbers), torch.cat(indices)))
                        boxes, indices, numbers, waiting = [], [], [], 0
        if boxes:
            _round(boxes, parts[0].stored.key(torch.cat(numbers), torch.cat(indices)))
        rounded = torch.cat([*values]).to(torch.bfloat16)
        torch._foreach_copy_([p.of(p.stored.parameter) for p in parts], _split(rounded, parts))

    def reset(self) -> None:
        """Does nothing: the parameter has the weights that were loaded."""


MainStored = Remainder | StochasticallyRounded


def element_hash(seed: int, step: int, numbers: Tensor, index: Tensor) -> Int32[Tensor, " n"]:
    """Returns 32 random bits for elements of parameters.

    Args:
        seed: Seed of the run.
        step: Number of the step.
        numbers: A number that stands for the name of the parameter of each element, `[n]`.
        index: Index of each element in the flattened global tensor, `[n]`.
    """
    return DropoutKey.for_tokens(seed, step, index[None], numbers[None]).word0.view(-1)


def _round(boxes: Sequence[Tensor], random: Int32[Tensor, " n"]) -> None:
    """Rounds fp32 tensors in place, with random bits for each of their elements in order."""
    bits = torch.cat([box.reshape(-1) for box in boxes]).view(torch.int32)
    rounded = ((bits + (random & 0xFFFF)) & _HIGH_BITS).view(torch.float32)
    parts = torch.split(rounded, [box.numel() for box in boxes])
    torch._foreach_copy_([*boxes], [p.view(b.shape) for p, b in zip(parts, boxes, strict=True)])


def _split(flat: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Returns consecutive slices of the sizes of some ranges."""
    return list(torch.split(flat, [part.stop - part.start for part in parts]))


def _padded(
    parts: Sequence[Part], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Returns zeros for whole blocks of each range, and the slices for the ranges themselves."""
    blocks = sum(-(-(part.stop - part.start) // BLOCK) for part in parts)
    flat = torch.zeros(blocks * BLOCK, dtype=dtype, device=device)
    return flat, _slots(flat, parts)


def _slots(flat: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Returns the slices of `_padded` for ranges, of another tensor of the same size."""
    slots, start = [], 0
    for part in parts:
        size = part.stop - part.start
        slots.append(flat[start : start + size])
        start += -(-size // BLOCK) * BLOCK
    return slots


def _exponents(parts: Sequence[Part]) -> list[Tensor]:
    """Returns the exponents of the blocks of each range."""
    return [p.stored.exponents[p.start // BLOCK : -(-p.stop // BLOCK)] for p in parts]


def _power_of_two(exponents: Int8[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Returns the exact powers, which ``pow`` of a device may not be."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _slices(view: View) -> Iterator[tuple[Tensor, int]]:
    """Yields slices of a view over its first dim, with the index of the first row."""
    tensor = view.tensor
    if tensor.dim() == 0:
        yield tensor, 0
        return
    rows = max(1, _ROUNDED_AT_ONCE // max(1, tensor[:1].numel()))
    for first in range(0, len(tensor), rows):
        yield tensor[first : first + rows], first


def _global_index(view: View, first: int, rows: int) -> Tensor:
    """Returns the indices in the flattened global tensor of some rows of a view, `[n]`."""
    index = torch.zeros((), dtype=torch.int64, device=view.tensor.device)
    lengths = (rows, *view.lengths[1:]) if view.lengths else ()
    for dim, (size, offset) in enumerate(zip(lengths, view.offsets, strict=True)):
        begin = offset + (first if dim == 0 else 0)
        along = torch.arange(begin, begin + size, device=index.device)
        index = index[..., None] * view.global_shape[dim] + along
    return index.reshape(-1)
