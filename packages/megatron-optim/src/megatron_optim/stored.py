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
from collections.abc import Callable, Iterator
from math import prod

import torch
from jaxtyping import Float, Float32, Int8, Int32
from megatron_parallel import DropoutKey, View
from torch import Tensor

from megatron_optim.state_format_config import BLOCK, PRECISION_BITS, StateFormat

_CODES = {"fp16": (torch.float16, 15), "fp8": (torch.float8_e4m3fn, 8)}
"""Dtype of each format with shared exponents, and the exponent that values of a block stay below.
The dtype must represent 2 to the power of that exponent."""
_HIGH_BITS = -(2**16)
_ROUNDED_AT_ONCE = 2**20


class Stored(ABC):
    """A tensor that is stored in another form than that of its updates.

    Attributes:
        shape: Its shape.
        cut: Whether ranges of it can be loaded and stored; they begin at multiples of `BLOCK`.
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

    @abstractmethod
    def load(self, start: int, stop: int) -> Float[Tensor, " n"]:
        """Returns a copy of a range of the flattened values, in fp32 or float64."""

    @abstractmethod
    def store(self, values: Float[Tensor, " n"], start: int, stop: int) -> None:
        """Takes new values of a range."""

    def load_all(self) -> Float[Tensor, "..."]:
        """Returns a copy of all values, in their shape."""
        return self.load(0, self.numel).view(self.shape)

    def store_all(self, values: Float[Tensor, "..."]) -> None:
        """Takes new values."""
        self.store(values.reshape(-1), 0, self.numel)


class Rounded(Stored):
    """Values that are rounded to bf16.

    Args:
        like: A tensor of the shape and on the device of the values, which are 0.
        dtype: The dtype that they are updated in.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        super().__init__(like.shape)
        self._dtype = dtype
        self._values = torch.zeros(self.numel, dtype=torch.bfloat16, device=like.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The rounded values."""
        return (self._values,)

    def load(self, start: int, stop: int) -> Float[Tensor, " n"]:
        """Returns a copy of a range."""
        return self._values[start:stop].to(self._dtype)

    def store(self, values: Float[Tensor, " n"], start: int, stop: int) -> None:
        """Rounds new values of a range."""
        self._values[start:stop].copy_(values)


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
        code, self._top = _CODES[format_name]
        self._dtype, self._positive = dtype, positive
        # One unit in the last place may carry a value over the next power of two.
        self._carry = 1.0 + 2.0 ** -PRECISION_BITS[format_name]
        self._smallest = float(torch.finfo(code).smallest_normal) * 2.0 ** (
            1 - PRECISION_BITS[format_name]
        )
        self._codes = torch.zeros(self.numel, dtype=code, device=like.device)
        blocks = -(-self.numel // BLOCK)
        self._exponents = torch.zeros(blocks, dtype=torch.int8, device=like.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The codes and the exponents."""
        return self._codes, self._exponents

    def load(self, start: int, stop: int) -> Float[Tensor, " n"]:
        """Returns a copy of a range."""
        values = self._codes[start:stop].to(self._dtype)
        for block, exponents in self._blocks(values, start):
            block.mul_(_power_of_two(exponents))
        return values

    def store(self, values: Float[Tensor, " n"], start: int, stop: int) -> None:
        """Rounds new values of a range."""
        scaled = values.clone()
        for block, exponents in self._blocks(scaled, start):
            largest = torch.linalg.vector_norm(block, torch.inf, dim=1)
            needed = torch.frexp(largest * self._carry).exponent - self._top
            exponents.copy_(needed[:, None].clamp(-100, 100))  # powers stay normal numbers
            block.mul_(_power_of_two(-exponents))
        if self._positive:
            scaled = torch.where(scaled > 0, scaled.clamp(min=self._smallest), scaled)
        self._codes[start:stop].copy_(scaled)

    def _blocks(self, flat: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields rows of whole blocks, and a last shorter one, with their exponents `[rows, 1]`."""
        first, rows = start // BLOCK, len(flat) // BLOCK
        if rows:
            whole = flat[: rows * BLOCK].view(rows, BLOCK)
            yield whole, self._exponents[first : first + rows].view(-1, 1)
        if rows * BLOCK < len(flat):
            yield flat[rows * BLOCK :].view(1, -1), self._exponents[first + rows :][:1].view(1, 1)


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
        self._parameter = parameter.detach()
        self._low = torch.zeros(self.numel, dtype=torch.int16, device=parameter.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The remainders."""
        return (self._low,)

    def load(self, start: int, stop: int) -> Float32[Tensor, " n"]:
        """Returns the exact values of a range."""
        high = self._parameter.view(-1)[start:stop].view(torch.int16).int()
        bits: Tensor = (high << 16).add_(self._low[start:stop])
        return bits.view(torch.float32)

    def store(self, values: Float[Tensor, " n"], start: int, stop: int) -> None:
        """Takes new values of a range, and rounds them into the parameter."""
        bits = values.view(torch.int32)
        high = (bits + 2**15) >> 16
        self._low[start:stop].copy_(bits - (high << 16))
        self._parameter.view(-1)[start:stop].view(torch.int16).copy_(high)

    def reset(self) -> None:
        """Takes the values of the parameter, after weights were loaded."""
        self._low.zero_()


class StochasticallyRounded(Stored):
    """A bf16 parameter without a main parameter.

    Rounding is random, by a hash of (seed, step, parameter, index of the element in the global
    tensor), so that it does not depend on the layout.

    Args:
        parameter: The parameter.
        views: Returns views of a tensor of the parameter's shape as boxes of the global tensor.
        key: Returns the hash of some elements in the current step, for their indices.
    """

    cut = False

    def __init__(
        self,
        parameter: Tensor,
        views: Callable[[Tensor], list[View]],
        key: Callable[[Tensor], Int32[Tensor, "..."]],
    ) -> None:
        super().__init__(parameter.shape)
        self._parameter, self._views, self._key = parameter.detach(), views, key

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()

    def load(self, start: int, stop: int) -> Float32[Tensor, " n"]:
        """Returns a copy of a range."""
        return self._parameter.view(-1)[start:stop].float()

    def store(self, values: Float[Tensor, " n"], start: int, stop: int) -> None:
        """Rounds all new values at random."""
        del start, stop
        values = values.view(self.shape)
        for view in self._views(values):
            for part, first in _slices(view):
                bits = part.view(torch.int32)
                index = _global_index(view, first, len(part) if part.dim() else 1)
                random = self._key(index).view(part.shape) & 0xFFFF
                part.copy_(((bits + random) & _HIGH_BITS).view(torch.float32))
        self._parameter.copy_(values)

    def reset(self) -> None:
        """Does nothing: the parameter has the weights that were loaded."""


MainStored = Remainder | StochasticallyRounded


def element_hash(seed: int, step: int, name: int, index: Tensor) -> Int32[Tensor, " n"]:
    """Returns 32 random bits for elements of a parameter.

    Args:
        seed: Seed of the run.
        step: Number of the step.
        name: A number that stands for the name of the parameter.
        index: Index of each element in the flattened global tensor, `[n]`.
    """
    position = torch.full((1,), name, dtype=torch.int64, device=index.device)
    key = DropoutKey.for_batch(seed=seed, iteration=step, samples=index, positions=position)
    return key.word0.view(-1)


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
