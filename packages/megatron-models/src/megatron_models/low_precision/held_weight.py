"""The converted weight of a layer, for the micro-batches of one step.

It is held only between `hold` and `release`, in which the step engine says that weights do not
change (`megatron_parallel.tensor_parallel.ConstantWeights`). A write in place to the parameter in
that time is found by its version, and the weight is converted again. Writes through other tensors
in the same memory, as those of an optimizer's shards and of gathers, have no version: they happen
outside of that time, and nothing outlives it.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

Conversion = Callable[[Tensor], tuple[Tensor | None, ...]]
"""Returns the tensors of a converted weight."""

COMPILED_ON: Final = ("cuda",)
"""Types of devices whose conversions are compiled: on a GPU, tens of kernels become a few."""


class HeldWeight:
    """What remains of one weight while it is constant.

    Attributes:
        holds: Whether the weight is constant now.
        tensors: The converted weight, empty before the first use.
    """

    def __init__(self) -> None:
        self.holds = False
        self._compiles = False
        self._compiled: tuple[object, Conversion] | None = None
        self.tensors: tuple[Tensor | None, ...] = ()
        self._source: tuple[Tensor, int] | None = None  # the weight and its version

    def hold(self, *, compiled: bool = False) -> None:
        """Begins a time in which the weight is constant.

        Args:
            compiled: Whether torch.compile compiles the conversion, on devices of `COMPILED_ON`.
        """
        self.release()
        self.holds, self._compiles = True, compiled

    def release(self) -> None:
        """Ends it, and drops the converted weight."""
        self.holds, self.tensors, self._source = False, (), None

    def of(self, weight: Tensor, convert: Conversion) -> tuple[Tensor | None, ...]:
        """Returns the converted weight; nothing if it is not constant now.

        Compiled code converts nothing: what it reads was converted before it was called.

        Args:
            weight: The parameter.
            convert: The conversion. Code that is compiled for it depends on the attributes of its
                object that it reads, and on the shape of the weight.
        """
        if not self.holds or torch.compiler.is_compiling():
            return self.tensors
        source = self._source
        if source is None or source[0] is not weight or source[1] != weight._version:
            if self._compiles and weight.device.type in COMPILED_ON:
                convert = self._compiled_of(convert)
            with torch.no_grad():
                self.tensors = convert(weight.detach())
            self._source = weight, weight._version
        return self.tensors

    def _compiled_of(self, convert: Conversion) -> Conversion:
        owner = getattr(convert, "__self__", convert)
        if self._compiled is None or self._compiled[0] is not owner:
            self._compiled = owner, torch.compile(convert, dynamic=False)
        return self._compiled[1]
