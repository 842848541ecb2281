"""Values that the host reads from the device, and their assumed values if there are none."""

from collections.abc import Callable, Sequence

from jaxtyping import Int, Shaped
from torch import Tensor

from megatron_parallel._compat.imagined import has_no_values


def read_integers(t: Int[Tensor, "..."], assumed: Callable[[], Sequence[int]]) -> list[int]:
    """Returns the elements of `t` in order; as `read_numbers`."""
    return [int(number) for number in read_numbers(t, assumed)]


def read_numbers(t: Shaped[Tensor, "..."], assumed: Callable[[], Sequence[float]]) -> list[float]:
    """Returns the elements of `t` in order. The host waits for the device, once.

    On an imagined device (`imagined_device`) tensors have no values. The result is then
    `assumed()`, for example the numbers of rows of experts with equal loads.

    Args:
        t: Numbers on any device.
        assumed: Returns plausible elements.

    Raises:
        ValueError: `assumed` returns another number of elements than `t` has.
    """
    if not has_no_values(t):
        values: list[float] = t.flatten().tolist()
        return values
    guessed = list(assumed())
    if len(guessed) != t.numel():
        raise ValueError(f"{len(guessed)} values are assumed for {t.numel()} elements")
    t.cpu()  # counts the wait
    return guessed
