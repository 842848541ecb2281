"""Environment variables that a launcher such as torchrun sets for each rank."""

import os
import reprlib

from megatron_parallel.errors import LayoutError

_DIGITS = 10  # of the largest accepted number


def environment_number(name: str, lowest: int, highest: int) -> int:
    """Returns the environment variable `name` as a number.

    Raises:
        LayoutError: The variable is not a whole number from `lowest` to `highest`.
    """
    text = os.environ[name].strip()
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else -1
    if not lowest <= number <= highest:
        raise LayoutError(
            f"the environment variable {name} is {reprlib.repr(text)}: set it to a whole number "
            f"from {lowest} to {highest}"
        )
    return number
