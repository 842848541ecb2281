"""The gradient of an output in few bits, which two products of a backward pass read."""

import weakref
from typing import Any, NamedTuple

from torch import Tensor


class FewBits(NamedTuple):
    """An operand in few bits.

    Attributes:
        operand: The operand.
        quantizer: Its quantizer.
    """

    operand: Tensor
    quantizer: Any


class SharedGradient:
    """Keeps the last gradient from `dgrad` to `wgrad`, as long as the gradient itself lives.

    The kernel that quantizes it writes rows and columns at once. A split backward pass has other
    tensors in its second half, and quantizes again. A copy is empty.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._few: FewBits | None = None

    def put(self, dy: Tensor, few: FewBits) -> None:
        """Keeps a gradient in few bits."""
        self._of, self._few = weakref.ref(dy, self._drop), few

    def take(self, dy: Tensor) -> FewBits | None:
        """Returns and forgets what was kept of a gradient, or None."""
        found = self._few if self._of is not None and self._of() is dy else None
        self._of = self._few = None
        return found

    def _drop(self, dead: "weakref.ref[Tensor]") -> None:
        """Forgets a gradient that is freed, if no other one was kept since."""
        if dead is self._of:
            self._of = self._few = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns an empty one."""
        return type(self), ()
