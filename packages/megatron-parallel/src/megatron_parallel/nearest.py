"""The valid values nearest to an invalid one, as text for errors. Does not import torch."""

from collections.abc import Iterable
from math import isqrt


def nearest(values: Iterable[int], number: int) -> str:
    """Returns the values next to a number, one below and one above: ``4 or 8``, or the only one.

    Args:
        values: Valid values, in any order; at least one.
        number: The invalid value.
    """
    found = list(values)
    below = max((each for each in found if each <= number), default=None)
    above = min((each for each in found if each > number), default=None)
    return " or ".join(str(each) for each in (below, above) if each is not None)


def nearest_multiples(number: int, step: int) -> str:
    """Returns the positive multiples of a step next to a number."""
    below = number // step * step
    return nearest([each for each in (below, below + step) if each > 0] or [step], number)


def nearest_divisors(whole: int, number: int) -> str:
    """Returns the divisors of a positive number next to another number."""
    return nearest(divisors(whole), number)


def divisors(whole: int) -> list[int]:
    """Returns the divisors of a positive number, in any order."""
    small = [each for each in range(1, isqrt(whole) + 1) if whole % each == 0]
    return [*small, *(whole // each for each in small if each * each != whole)]
